// SQL over everything that the cluster knows: an editor with its tables beside it, results as a table, as CSV and as JSON.
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { post, useGet } from "../lib/api.js";
import { href, setQuery } from "../lib/router.js";
import { number, plural } from "../lib/format.js";
import { Empty, Failure, Loading, Virtual } from "../parts/basics.js";
import { Icon } from "../parts/icons.js";

const ROWS_MAX = 10_000;
const SAVED_MAX = 50;
const EXAMPLES = [
  ["Counts by status", "select service, status, count(*) as n from invocations group by service, status order by n desc"],
  ["Failures of the last hour", "select service, handler, failure_message, count(*) as n from invocations\nwhere end = 'failed' and completed_at > datetime('now', '-1 hour') group by 1, 2, 3 order by n desc"],
  ["Longest in progress", "select id, service, handler, key, status, created_at from invocations where status <> 'completed' order by created_at limit 100"],
];

function saved() {
  try {
    const found = JSON.parse(localStorage.getItem("queries") || "[]");
    return Array.isArray(found) ? found.filter((each) => typeof each === "string") : [];
  } catch {
    return [];
  }
}

function keep(queries) {
  try {
    localStorage.setItem("queries", JSON.stringify(queries.slice(0, SAVED_MAX)));
  } catch {
    // Storage is blocked: they last as long as the page.
  }
}

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A value as a field of CSV (RFC 4180). */
export function csvField(value) {
  const text = value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  // A spreadsheet would run a text that begins like a formula.
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

const csv = ({ columns, rows }) => [columns.map((each) => csvField(each.name)), ...rows.map((row) => row.map(csvField))].map((each) => each.join(",")).join("\r\n");
const json = ({ columns, rows }) => JSON.stringify(rows.map((row) => Object.fromEntries(row.map((value, at) => [columns[at].name, value]))), null, 2);

function Result({ result }) {
  const { columns, rows } = result;
  const widths = columns.map((column, at) => Math.min(42, Math.max(column.name.length, ...rows.slice(0, 100).map((row) => String(row[at] ?? "").length)) + 3));
  const template = { gridTemplateColumns: widths.map((each) => `minmax(${each}ch, ${each}fr)`).join(" "), minWidth: `${widths.reduce((sum, each) => sum + each, 0) + columns.length * 2}ch` };
  const cell = (value) => {
    if (value === null) return html`<span class="faint">null</span>`;
    if (typeof value === "string" && /^inv_[0-9a-f]{32}$/.test(value)) return html`<a href=${href(["invocations", value])}>${value}</a>`;
    return typeof value === "object" ? JSON.stringify(value) : String(value);
  };
  return html`<section class="card result"><header><h2>${plural(rows.length, "row")}${result.more ? " and more" : ""}</h2><span class="muted">${number(result.took_ms)} ms, ${number(result.rows_read)} rows read</span>
      <button type="button" class="small" onClick=${() => download("result.csv", "text/csv", csv(result))}><${Icon} name="download" size=${13} />CSV</button><button type="button" class="small" onClick=${() => download("result.json", "application/json", json(result))}><${Icon} name="download" size=${13} />JSON</button></header>
    ${rows.length === 0 ? html`<div class="body muted">No rows.</div>` : html`<div class="result-rows" style=${{ height: `${Math.min(rows.length + 1, 18) * 32 + 16}px` }}><${Virtual} rows=${rows} height=${32} label="Result" columns=${columns.length}
      top=${html`<div class="sql-row head" role="row" style=${template}>${columns.map((each) => html`<span role="columnheader" title=${each.type}>${each.name}</span>`)}</div>`}
      line=${(row, at, place) => html`<div class="line sql-row" role="row" aria-rowindex=${at + 2} key=${at} style=${{ ...place, ...template }}>${row.map((value) => html`<span role="cell" class="clip mono">${cell(value)}</span>`)}</div>`} /></div>`}</section>`;
}

export default function Sql({ query }) {
  const tables = useGet("/query/tables");
  const editor = useRef(null);
  const [text, setText] = useState(query.q || EXAMPLES[0][1]);
  const [state, setState] = useState({ result: null, error: null, busy: false });
  const [kept, setKept] = useState(saved);
  const run = async (sql = text) => {
    if (state.busy) return;
    setText(sql);
    setQuery({ q: sql });
    setState({ ...state, busy: true });
    try {
      setState({ result: await post("/query", {}, { sql, limit: ROWS_MAX }), error: null, busy: false });
    } catch (error) {
      setState({ result: null, error, busy: false });
    }
  };
  useEffect(() => {
    if (query.q) run();
  }, []);
  const insert = (word) => {
    const field = editor.current;
    const [from, to] = [field.selectionStart, field.selectionEnd];
    setText(text.slice(0, from) + word + text.slice(to));
    requestAnimationFrame(() => {
      field.focus();
      field.setSelectionRange(from + word.length, from + word.length);
    });
  };
  const store = (next) => {
    setKept(next);
    keep(next);
  };
  if (tables.error?.missing) return html`<div class="page"><div class="page-head"><h1>SQL</h1></div><${Failure} error=${tables.error} what="SQL" /></div>`;
  return html`<div class="page"><div class="page-head"><h1>SQL</h1></div>
    <div class="sql"><div class="stack">
      <form class="card editor" onSubmit=${(event) => {
        event.preventDefault();
        run();
      }}><textarea id="sql" class="mono" ref=${editor} aria-label="SQL" rows="7" spellcheck=${false} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${(event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
          event.preventDefault();
          run();
        }
      }}></textarea>
        <div class="row wrap editor-foot"><button type="submit" class="primary" disabled=${state.busy}><${Icon} name="play" size=${13} />${state.busy ? "Running…" : "Run"}</button><span class="muted"><kbd>Ctrl Enter</kbd></span><span class="grow"></span>
          <button type="button" onClick=${() => store([text, ...kept.filter((each) => each !== text)])}>Save</button></div></form>
      ${state.error && html`<${Failure} error=${state.error} what="SQL" />`}
      ${state.result ? html`<${Result} result=${state.result} />` : !state.error && html`<${Empty} icon="sql" title="Ask the whole cluster"><p>Invocations, journals, state, timers, nodes and partitions are tables. A query reads them and changes nothing.</p></${Empty}>`}
      </div>
      <div class="stack"><section class="card"><header><h2>Queries</h2></header><ul class="queries">${kept.map((each) => html`<li class="row"><button type="button" class="link clip grow" title=${each} onClick=${() => run(each)}>${each.replace(/\s+/g, " ")}</button><button type="button" class="copy" aria-label="Forget this query" onClick=${() => store(kept.filter((other) => other !== each))}><${Icon} name="cross" size=${12} /></button></li>`)}
          ${EXAMPLES.map(([label, sql]) => html`<li><button type="button" class="link" onClick=${() => run(sql)}>${label}</button></li>`)}</ul></section>
        <section class="card"><header><h2>Tables</h2></header><div class="body tables">${!tables.data && !tables.error && html`<${Loading} />`}${tables.error && html`<${Failure} error=${tables.error} />`}
          ${tables.data?.tables.map((table, at) => html`<details key=${table.name} open=${at === 0}><summary><code>${table.name}</code></summary><p class="muted">${table.about.split("`").map((part, odd) => (odd % 2 ? html`<code>${part}</code>` : part))}</p><ul>${table.columns.map((column) => html`<li><button type="button" class="link mono" title=${column.about} onClick=${() => insert(column.name)}>${column.name}</button> <span class="faint">${column.type}</span></li>`)}</ul></details>`)}</div></section></div></div></div>`;
}
