// Small parts: times, ids, values, empty and error states, and a list that makes only the rows that are seen.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../lib/ui.js";
import { useStore } from "../lib/store.js";
import { exact, ms, now, relative, shortId, visible } from "../lib/format.js";
import { href } from "../lib/router.js";
import { Icon } from "./icons.js";
import { toast } from "./dialog.js";

export function Time({ at, live = true }) {
  const current = useStore(now);
  if (!at || Number.isNaN(ms(at))) return html`<span class="faint">–</span>`;
  return html`<time datetime=${at} title=${exact(at)}>${relative(at, live ? current : Date.now())}</time>`;
}

export function copy(text, what = "Copied") {
  navigator.clipboard?.writeText(text).then(
    () => toast(what),
    () => toast("The browser did not allow copying", "worst"),
  ) ?? toast("Copying needs HTTPS or localhost", "worst");
}

export function Copy({ text, label = "Copy" }) {
  return html`<button type="button" class="copy" title=${label} aria-label=${label} onClick=${(event) => {
    event.preventDefault();
    event.stopPropagation();
    copy(text);
  }}><${Icon} name="copy" size=${13} /></button>`;
}

export function Id({ id, whole, plain }) {
  if (!id) return html`<span class="faint">–</span>`;
  const shown = whole ? id : shortId(id);
  return html`<span class="id">
    ${id.startsWith("inv_") && !plain ? html`<a href=${href(["invocations", id])} title=${id}>${shown}</a>` : html`<span title=${id}>${shown}</span>`}
    <${Copy} text=${id} label=${`Copy ${shortId(id)}`} />
  </span>`;
}

export function Code({ text }) {
  return html`<div class="code mono"><span>${text}</span><${Copy} text=${text} /></div>`;
}

export function Notice({ kind = "", icon = "info", children }) {
  return html`<div class=${`notice ${kind}`}><${Icon} name=${icon} /><div class="grow">${children}</div></div>`;
}

export function Empty({ icon = "info", title, level = "h2", children }) {
  return html`<div class="empty"><${Icon} name=${icon} size=${28} /><${level}>${title}</${level}>${children}</div>`;
}

export function Failure({ error, what = "This page", retry }) {
  if (!error) return null;
  if (error.missing) {
    return html`<${Empty} icon="info" title=${`${what} needs a newer release`}>
      <p>This node does not have the endpoint behind it. Everything else works. Upgrade the node to see it.</p></${Empty}>`;
  }
  if (error.status === 0) return html`<p class="muted" role="status">Waiting for the node…</p>`; // The banner says the rest.
  if (error.status === 403) {
    return html`<${Empty} icon="tokens" title="Your token may not see this"><p>${error.message}. ${error.hint}</p></${Empty}>`;
  }
  return html`<${Notice} kind="worst" icon="warning"><strong>${error.message}</strong>
    ${error.hint && html`<div>${error.hint}</div>`}
    ${error.details?.length ? html`<ul>${error.details.map((each) => html`<li>${each}</li>`)}</ul>` : null}
    ${retry && html`<div><button type="button" class="link" onClick=${retry}>Try again</button></div>`}</${Notice}>`;
}

export function Loading() {
  const [shown, show] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => show(true), 250);
    return () => clearTimeout(timer);
  }, []);
  return shown ? html`<p class="muted" role="status">Loading…</p>` : null;
}

/** A value as a tree. Long lists and texts are shown in part, the rest on demand. */
export function Json({ value, name, depth = 0 }) {
  const label = name !== undefined && html`<span class="name">${visible(name)}</span>`;
  if (value === null || typeof value !== "object") {
    const kind = typeof value === "string" ? "text" : ["number", "bigint"].includes(typeof value) ? "number" : "word";
    return html`<div class="json">${label}<${Leaf} kind=${kind} value=${value} /></div>`;
  }
  const list = Array.isArray(value);
  const entries = list ? value.map((each, at) => [at, each]) : Object.entries(value);
  if (!entries.length) return html`<div class="json">${label}<span class="muted">${list ? "[ ]" : "{ }"}</span></div>`;
  return html`<div class="json"><details open=${depth < 2 && entries.length <= 100}>
    <summary>${label}${list ? `[${entries.length}]` : `{${entries.length}}`}</summary>
    <${Entries} entries=${entries} depth=${depth} />
  </details></div>`;
}

function Entries({ entries, depth }) {
  const [most, setMost] = useState(100);
  return html`<div>${entries.slice(0, most).map(([name, value]) => html`<${Json} key=${name} name=${name} value=${value} depth=${depth + 1} />`)}
    ${entries.length > most && html`<button type="button" class="link" onClick=${() => setMost(most + 500)}>${entries.length - most} more</button>`}</div>`;
}

function Leaf({ kind, value }) {
  const [whole, setWhole] = useState(false);
  const text = visible(kind === "text" ? JSON.stringify(value) : value);
  if (text.length <= 2000 || whole) return html`<span class=${kind}>${text}</span>`;
  return html`<span class=${kind}>${text.slice(0, 2000)}…</span> <button type="button" class="link" onClick=${() => setWhole(true)}>all ${text.length} characters</button>`;
}

/** `rows`: any number. `line(row, index)` makes one. `more()` is called near the end. */
export function Virtual({ rows, height, line, more, top, label, columns, atRow, plain }) {
  const box = useRef(null);
  const [view, setView] = useState({ from: 0, size: 40 });
  const measure = () => {
    const element = box.current;
    if (!element) return;
    const from = Math.max(0, Math.floor(element.scrollTop / height) - 8);
    const size = Math.ceil(element.clientHeight / height) + 16;
    setView((old) => (old.from === from && old.size === size ? old : { from, size }));
  };
  useLayoutEffect(() => {
    measure();
    const watch = new ResizeObserver(measure);
    watch.observe(box.current);
    return () => watch.disconnect();
  }, [height]);
  useEffect(() => {
    // After every change of the rows: a page may be empty and still have others behind it.
    if (more && view.from + view.size >= rows.length - 40) more();
  }, [view.from, view.size, rows, more]);
  useLayoutEffect(() => {
    if (atRow === undefined || atRow < 0) return;
    const element = box.current;
    const y = atRow * height;
    if (y < element.scrollTop) element.scrollTop = y;
    else if (y + height > element.scrollTop + element.clientHeight) element.scrollTop = y + height - element.clientHeight;
  }, [atRow, height]);
  const shown = rows.slice(view.from, view.from + view.size);
  const roles = plain ? { role: "group", "aria-label": label } : { role: "table", "aria-label": label, "aria-rowcount": rows.length + 1, "aria-colcount": columns };
  return html`<div class="virtual" ref=${box} onScroll=${measure} tabindex="0" ...${roles}>
    ${top}
    <div class="inner" role=${plain ? undefined : "rowgroup"} style=${{ height: `${rows.length * height}px` }}>
      ${shown.map((row, at) => line(row, view.from + at, { top: `${(view.from + at) * height}px`, height: `${height}px` }))}
    </div>
  </div>`;
}

export function useNarrow(query = "(max-width: 640px)") {
  const [narrow, set] = useState(matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const watch = () => set(media.matches);
    media.addEventListener("change", watch);
    return () => media.removeEventListener("change", watch);
  }, [query]);
  return narrow;
}

export function Menu({ label, children, toRight, cls = "", icon }) {
  const [open, set] = useState(false);
  const box = useRef(null);
  /** Focus goes back to the button, so that a dialog that opens now returns it there, too. */
  const close = () => {
    set(false);
    if (box.current?.contains(document.activeElement)) box.current.querySelector("button").focus();
  };
  useEffect(() => {
    if (!open) return undefined;
    const leave = (event) => {
      if (event.type === "keydown" && event.key === "Escape") close();
      if (event.type === "pointerdown" && !box.current?.contains(event.target)) set(false);
    };
    addEventListener("pointerdown", leave);
    addEventListener("keydown", leave);
    return () => {
      removeEventListener("pointerdown", leave);
      removeEventListener("keydown", leave);
    };
  }, [open]);
  return html`<div class="menu" ref=${box}>
    <button type="button" class=${cls} aria-expanded=${open ? "true" : "false"} onClick=${() => set(!open)}>${icon && html`<${Icon} name=${icon} />`}${label}</button>
    ${open && html`<div class=${`sheet ${toRight ? "to-right" : ""}`} onClick=${(event) => event.target.closest("button[data-ends]") && close()}>${children(close)}</div>`}
  </div>`;
}
