// One field for search and commands: an id, a key, a service, "drain n2".
import { html, useEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { get, may, post, segment } from "../lib/api.js";
import { store, useStore } from "../lib/store.js";
import { go, route } from "../lib/router.js";
import { boundKeys, useKeys } from "../lib/keys.js";
import { Dialog, attempt, confirm } from "./dialog.js";
import { visiblePages } from "./frame.js";
import { askToPause, pauses } from "./pauses.js";
import { Icon } from "./icons.js";

const open = store(false);
const help = store(false);
export const openPalette = () => open.set(true);
route.watch(() => open.set(false));

function commands(text, services, cluster) {
  const found = [];
  const add = (icon, label, note, run) => found.push({ icon, label, note, run });
  const words = text.trim();
  const low = words.toLowerCase();
  if (/^inv_[0-9a-f]{8,}/.test(low)) add("invocations", words, "open invocation", () => go(["invocations", low]));
  for (const [name, label] of visiblePages()) {
    if (label.toLowerCase().includes(low)) add(name, label, "page", () => go([name]));
  }
  for (const { name, kind, handlers } of services) {
    if (low && name.toLowerCase().includes(low)) {
      add("services", name, kind, () => go(["services", name]));
      add("invocations", name, "its invocations", () => go(["invocations"], { service: name }));
      if (kind !== "service") add("objects", name, "its keys", () => go(["objects", name]));
    }
    for (const handler of low ? handlers : []) {
      if (`${name}/${handler}`.toLowerCase().includes(low) && handler.toLowerCase().includes(low.split("/").pop())) {
        add("invocations", `${name}/${handler}`, "its invocations", () => go(["invocations"], { service: name, handler }));
      }
    }
  }
  if (may("operate")) {
    for (const node of cluster?.nodes || []) {
      for (const action of ["drain", "undrain"]) {
        const label = `${action} ${node.name}`;
        if (low && label.includes(low)) add("cluster", label, "command", () => command(action, node));
      }
    }
  }
  if (may("operate") && low && pauses.get()) {
    for (const scope of [{}, ...services.map(({ name }) => ({ service: name }))]) {
      const label = `pause ${scope.service || "everything"}`;
      if (label.includes(low)) add("pause", label, "command", () => askToPause(scope));
    }
  }
  if (words && !low.startsWith("inv_")) add("search", `key = ${words}`, "invocations with this key", () => go(["invocations"], { key: words }));
  return found.slice(0, 30);
}

async function command(action, node) {
  const text = action === "drain" ? `Its ${node.leads ?? ""} leaderships move to other nodes. Requests continue.` : "It receives leaderships again.";
  if (!(await confirm({ title: `${action} ${node.name}?`, text, word: action, danger: action === "drain" }))) return;
  await attempt(() => post(`/cluster/nodes/${segment(node.name)}/${action}`), `${node.name}: ${action} is under way`);
  go(["cluster"]);
}

function Palette() {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const [known, setKnown] = useState({ services: [], cluster: null });
  const list = useRef(null);
  useEffect(() => {
    Promise.allSettled([get("/services"), get("/cluster")]).then(([services, cluster]) =>
      setKnown({ services: services.value?.services || [], cluster: cluster.value || null }));
  }, []);
  const found = useMemo(() => commands(text, known.services, known.cluster), [text, known]);
  const chosen = Math.min(at, found.length - 1);
  useEffect(() => list.current?.children[chosen]?.scrollIntoView({ block: "nearest" }), [chosen]);
  const close = () => open.set(false);
  const run = (each) => {
    close();
    each?.run();
  };
  const onKeyDown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      setAt((Math.max(0, chosen) + step + found.length) % Math.max(1, found.length));
    } else if (event.key === "Enter") {
      event.preventDefault();
      run(found[chosen]);
    }
  };
  return html`<${Dialog} title="Search and commands" onClose=${close}><div class="palette-body">
    <input role="combobox" aria-expanded="true" aria-controls="found" aria-activedescendant=${found.length ? `found-${chosen}` : undefined} aria-label="Search and commands"
      placeholder="An id, a key, a service, a page, or “drain n2”" value=${text} onInput=${(event) => {
        setText(event.target.value);
        setAt(0);
      }} onKeyDown=${onKeyDown} autofocus />
    <ul id="found" role="listbox" aria-label="Found" ref=${list}>${found.map((each, index) => html`<li id=${`found-${index}`} role="option" aria-selected=${index === chosen ? "true" : "false"}
      onClick=${() => run(each)} onPointerMove=${() => setAt(index)}><${Icon} name=${each.icon} /><span class="clip">${each.label}</span><span class="muted">${each.note}</span></li>`)}</ul>
    ${!found.length && html`<p class="nothing">Nothing of that name.</p>`}
  </div></${Dialog}>`;
}

function Help() {
  return html`<${Dialog} title="Keys" onClose=${() => help.set(false)}><div class="dialog-body"><h1>Keys</h1>
    <dl class="facts">${boundKeys().map(([key, what]) => html`<dt><kbd>${key.replace("-k", " K")}</kbd></dt><dd>${what}</dd>`)}</dl>
    <div class="actions"><button type="button" onClick=${() => help.set(false)} autofocus>Close</button></div></div></${Dialog}>`;
}

export function Palettes() {
  const shown = useStore(open);
  const helps = useStore(help);
  useKeys({
    "Ctrl-k": ["Search and commands", () => open.set(!open.get())],
    "?": ["This list", () => help.set(true)],
  });
  return html`<div class="palettes">${shown && html`<${Palette} />`}${helps && html`<${Help} />`}</div>`;
}
