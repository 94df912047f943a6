// The frame: rail, top bar with the health of the cluster, banner while the node does not answer.
import { html, useEffect, useState } from "../lib/ui.js";
import { connection, may, session, useGet } from "../lib/api.js";
import { useStore } from "../lib/store.js";
import { href, route } from "../lib/router.js";
import { duration, now, plural } from "../lib/format.js";
import { Icon } from "./icons.js";
import { Menu } from "./basics.js";
import { signOut } from "./sign_in.js";
import { openPalette } from "./palette.js";
import { Pauses } from "./pauses.js";

export const PAGES = [
  ["overview", "Overview"], ["invocations", "Invocations"], ["inbox", "Inbox"], ["services", "Services"], ["objects", "Objects"],
  ["cluster", "Cluster"], ["sql", "SQL"], ["webhooks", "Webhooks", "operate"], ["audit", "Audit", "admin"], ["tokens", "Tokens", "admin"],
];

const AT_HAND = 4; // pages in the bar of a phone; the others are behind “More”

export const visiblePages = () => PAGES.filter(([, , role]) => !role || may(role));

/** The worst thing first: [kind, words]. */
export function health(cluster, deployments) {
  if (!cluster) return ["", "checking"];
  const nodes = cluster.nodes.filter((node) => node.state !== "removed");
  const away = nodes.filter((node) => !node.connected);
  const leaderless = cluster.partitions.filter((each) => !each.leader).length;
  const down = (deployments || []).filter((each) => each.health.status === "down");
  const bad = (deployments || []).filter((each) => ["stalled", "crashing"].includes(each.health.status));
  if (leaderless) return ["worst", `${plural(leaderless, "partition")} without leader`];
  if (away.length) return ["worst", away.length === 1 ? `node ${away[0].name} away` : `${away.length} nodes away`];
  if (nodes.some((node) => node.disk_full)) return ["worst", `disk full: ${nodes.find((node) => node.disk_full).name}`];
  if (down.length) return ["worst", `${plural(down.length, "endpoint")} down`];
  if (bad.length) return ["worse", `${plural(bad.length, "endpoint")} ${bad[0].health.status}`];
  if (nodes.some((node) => node.state === "draining")) return ["worse", `${nodes.find((node) => node.state === "draining").name} draining`];
  return ["good", "all is well"];
}

const THEMES = [["auto", "As the system", "auto"], ["light", "Light", "sun"], ["dark", "Dark", "moon"]];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // Storage is blocked: the theme lasts as long as the page.
  }
  dispatchEvent(new Event("themechange"));
}

function Banner() {
  const state = useStore(connection);
  const at = useStore(now);
  if (state.up) return null;
  return html`<div class="banner" role="alert"><${Icon} name="warning" /><span>Node ${session.get().node} has not answered for ${duration(Math.max(1000, Math.floor((at - state.since) / 1000) * 1000))}.
    What you see is from before; it is asked again every few seconds. Other nodes of the cluster show the same console.</span></div>`;
}

export function Frame({ children, waiting }) {
  const principal = useStore(session);
  const { path } = useStore(route);
  const state = useStore(connection);
  const cluster = useGet("/cluster", {}, { kinds: ["cluster"], every: state.up ? 15_000 : 2000 });
  const deployments = useGet("/deployments", {}, { kinds: ["deployments"], every: 30_000 });
  const [narrow, setNarrow] = useState(() => remembered("rail") === "narrow");
  const [kind, words] = state.up ? health(cluster.data, deployments.data?.deployments) : ["worst", "node does not answer"];
  const [open, setOpen] = useState(false);
  const current = path[0] || "overview";
  useEffect(() => setOpen(false), [path.join("/")]);
  useEffect(() => {
    const name = PAGES.find(([each]) => each === current)?.[1] || "Holdfast";
    document.title = `${path[1] ? `${path[1]} · ` : ""}${name} · ${principal.cluster || "Holdfast"}`;
  }, [path.join("/")]);
  const pages = visiblePages();
  const behind = pages.slice(AT_HAND).find(([name]) => name === current);
  const item = ([name, label]) => html`<a key=${name} class="item" href=${href([name])} aria-current=${current === name ? "page" : undefined} title=${label}>
    <${Icon} name=${name} /><span class="label">${label}</span>
    ${name === "inbox" && waiting ? html`<span class="badge" aria-label=${`${waiting} waiting`}>${waiting}</span>` : null}</a>`;
  return html`<div class=${`frame ${narrow ? "narrow-rail" : ""}`}>
    <nav class=${`rail ${open ? "open" : ""}`} aria-label="Pages" onKeyDown=${(event) => event.key === "Escape" && setOpen(false)}>
      <a class="skip button" href=${location.hash} onClick=${(event) => {
      event.preventDefault();
      document.querySelector("main").focus();
    }}>Skip to the page</a>
      <a class="brand" href="#/overview" aria-label="Holdfast: overview"><${Icon} name="holdfast" size=${20} /><span class="label">Holdfast</span></a>
      ${pages.slice(0, AT_HAND).map(item)}
      <div class="others">${pages.slice(AT_HAND).map(item)}</div>
      <button type="button" class=${`all ${behind ? "current" : ""}`} aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}><${Icon} name=${behind ? current : "more"} /><span>${behind ? behind[1] : "More"}</span></button>
      <span class="space"></span>
      <button type="button" class="bare collapse" aria-label="Collapse the rail" aria-pressed=${narrow ? "true" : "false"} onClick=${() => {
        remember("rail", narrow ? "" : "narrow");
        setNarrow(!narrow);
      }}><${Icon} name="collapse" /><span class="label">Collapse</span></button>
    </nav>
    <header class="top">
      <span class="cluster" title=${`node ${principal.node}, release ${principal.version}`}>${principal.cluster}</span>
      <a class=${`pill ${kind}`} href=${href(["cluster"])}><${Icon} name=${kind === "good" ? "check" : kind ? "warning" : "more"} size=${13} />${words}</a>
      <button type="button" class="command" onClick=${openPalette}>
        <${Icon} name="search" size=${14} /><span class="label">Search or command</span><kbd aria-hidden="true">Ctrl K</kbd></button>
      <div class="who">
        <${Menu} cls="bare" icon="auto" toRight label=${html`<span class="hidden-text">Theme</span>`}>${(close) => THEMES.map(([theme, label, icon]) => html`<button type="button" onClick=${() => {
          setTheme(theme);
          close();
        }}><${Icon} name=${icon} />${label}</button>`)}</${Menu}>
        <span class="label" id="signed-in" title=${`roles: ${principal.roles.join(", ")}`}>${principal.name} <span class="tag">${principal.roles.join(", ")}</span></span>
        ${principal.asks_for_tokens && html`<button type="button" class="bare" id="sign-out" aria-label="Sign out" title="Sign out" onClick=${signOut}><${Icon} name="leave" /></button>`}
      </div>
    </header>
    <main tabindex="-1"><${Banner} /><${Pauses} />${children}</main>
  </div>`;
}

function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // Storage is blocked: it is forgotten with the page.
  }
}
