// The start of the console: who is signed in, which page is shown. Pages are loaded when they are opened.
import { Component, html, render, useCallback, useEffect, useLayoutEffect, useState } from "./lib/ui.js";
import { refreshSession, session, useGet, useReturn } from "./lib/api.js";
import { useStore } from "./lib/store.js";
import { route } from "./lib/router.js";
import { Overlays } from "./parts/dialog.js";
import { Frame } from "./parts/frame.js";
import { Palettes } from "./parts/palette.js";
import { SignIn } from "./parts/sign_in.js";
import { Empty, Failure } from "./parts/basics.js";
import { PauseQuestion } from "./parts/pauses.js";

const MODULES = {
  overview: () => import("./pages/overview.js"),
  invocations: () => import("./pages/invocations.js"),
  invocation: () => import("./pages/invocation.js"),
  inbox: () => import("./pages/inbox.js"),
  services: () => import("./pages/services.js"),
  objects: () => import("./pages/objects.js"),
  cluster: () => import("./pages/cluster.js"),
  sql: () => import("./pages/sql.js"),
  webhooks: () => import("./pages/webhooks.js"),
  audit: () => import("./pages/audit.js"),
  tokens: () => import("./pages/tokens.js"),
};
const REST_MS = 1000;
const loaded = new Map();

function load(name) {
  return MODULES[name]().then((found) => {
    loaded.set(name, found);
    return found;
  });
}

function nameOf(path) {
  const first = path[0] || "overview";
  return first === "invocations" && path[1] ? "invocation" : first;
}

// The page loads while the node says who is signed in.
if (Object.hasOwn(MODULES, nameOf(route.get().path))) load(nameOf(route.get().path)).catch(() => {});

class Boundary extends Component {
  static getDerivedStateFromError(error) {
    return { error };
  }

  componentDidCatch(error) {
    console.error(error);
  }

  render({ children }, { error }) {
    return error ? html`<div class="page"><${Failure} error=${{ message: `This page has a fault: ${error.message}`, hint: "Other pages work. Reload to try again." }} /></div>` : children;
  }
}

function Page({ name, path, query }) {
  const [module, set] = useState(() => loaded.get(name) || null);
  const [error, setError] = useState(null);
  const open = useCallback(() => {
    if (loaded.has(name)) set(loaded.get(name));
    else load(name).then((found) => {
      set(found);
      setError(null);
    }, () => setError({ message: "this page could not be loaded", hint: "reload to try again" }));
  }, [name]);
  useLayoutEffect(open, [open]);
  useReturn(open);
  if (error) return html`<div class="page"><${Failure} error=${error} /></div>`;
  return module && html`<${module.default} path=${path} query=${query} />`;
}

/** How many things wait for somebody: shown at the inbox. */
function useWaiting() {
  const asked = useGet("/waiting", { kind: "in-doubt,approval", limit: 100 }, { every: 30_000 });
  return asked.data?.waiting.length || 0;
}

/** The other pages, once there is time: they open at once then, even while the node is away. */
function loadTheRest() {
  const later = window.requestIdleCallback || ((act) => setTimeout(act, 200));
  setTimeout(() => later(() => Object.keys(MODULES).forEach((name) => load(name).catch(() => {}))), REST_MS);
}

function Console() {
  useEffect(loadTheRest, []);
  const { path, query } = useStore(route);
  const waiting = useWaiting();
  const name = nameOf(path);
  const known = Object.hasOwn(MODULES, name);
  return html`<${Frame} waiting=${waiting}><${Boundary} key=${`${name}/${path[1] || ""}`}>
    ${known ? html`<${Page} key=${name} name=${name} path=${path} query=${query} />`
      : html`<${Empty} level="h1" title="There is no such page"><p>The address ends in “${name}”. Choose a page on the left.</p></${Empty}>`}
  </${Boundary}></${Frame}>`;
}

function App() {
  const principal = useStore(session);
  const [problem, setProblem] = useState(null);
  useLayoutEffect(() => {
    let timer = 0;
    const start = () => refreshSession().then(() => setProblem(null), (error) => {
      setProblem(error);
      timer = setTimeout(start, 2000);
    });
    start();
    return () => clearTimeout(timer);
  }, []);
  if (!principal) return problem && html`<div class="page"><${Failure} error=${problem} /></div>`;
  // Strangers are told nothing about the node, so its name says whether the token may read.
  return html`${principal.node ? html`<${Console} />` : html`<${SignIn} principal=${principal} />`}
    ${principal.node && html`<${Palettes} /><${PauseQuestion} />`}<${Overlays} />`;
}

render(html`<${App} />`, document.getElementById("app"));
