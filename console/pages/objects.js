// Virtual objects and workflows: their keys, the state of one, who holds it and who waits.
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { ask, get, may, segment, useGet } from "../lib/api.js";
import { go, href, setQuery } from "../lib/router.js";
import { bytes, number, oneLine, plural, visible } from "../lib/format.js";
import { Status, statusOf } from "../parts/status.js";
import { Empty, Failure, Id, Json, Loading, Notice, Time } from "../parts/basics.js";
import { attempt, toast } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";
import { PauseButton } from "../parts/pauses.js";
import { parse } from "../lib/json.js";

const KEYS_PAGE = 200;

function Services() {
  const asked = useGet("/services", {}, { kinds: ["deployments"] });
  const list = asked.data?.services.filter((each) => each.kind !== "service");
  if (asked.error) return html`<${Failure} error=${asked.error} retry=${asked.reload} />`;
  if (!list) return html`<${Loading} />`;
  if (!list.length) return html`<${Empty} icon="objects" title="No objects"><p>Virtual objects and workflows keep state under each key. No registered service is one.</p></${Empty}>`;
  return html`<div class="service-cards">${list.map((each) => html`<a class="card service" href=${href(["objects", each.name])} key=${each.name}><span class="row"><strong>${each.name}</strong><span class="tag">${each.kind}</span></span><span class="muted clip">${each.doc || each.handlers.join(", ")}</span></a>`)}</div>`;
}

function GoTo({ service }) {
  const field = useRef(null);
  return html`<form class="row" onSubmit=${(event) => {
    event.preventDefault();
    go(["objects", service, field.current.value]);
  }}><input ref=${field} aria-label="Key" placeholder="Key, as in user-17" required spellcheck=${false} autocomplete="off" /><button type="submit">Open</button></form>`;
}

/** An older node lists no keys: those of recent invocations are shown instead. */
function RecentKeys({ service }) {
  const asked = useGet("/invocations", { service, limit: 500 });
  const keys = [...new Set((asked.data?.invocations || []).map((each) => each.key).filter(Boolean))];
  return html`<${Notice}>This node does not list keys yet. These had an invocation lately; any other key opens by its name.</${Notice}>
    ${keys.length > 0 && html`<ul class="card key-list">${keys.map((key) => html`<li key=${key}><a class="mono" href=${href(["objects", service, key])}>${key}</a></li>`)}</ul>`}`;
}

function Keys({ service, query }) {
  const asked = useGet(`/services/${segment(service)}/keys`, { prefix: query.prefix, limit: KEYS_PAGE }, { every: 10_000 });
  const [more, setMore] = useState({ keys: [], cursor: undefined });
  useEffect(() => setMore({ keys: [], cursor: undefined }), [query.prefix, service]);
  const cursor = more.cursor === undefined ? asked.data?.cursor : more.cursor;
  const load = () => attempt(async () => {
    const answer = await get(`/services/${segment(service)}/keys`, { prefix: query.prefix, limit: KEYS_PAGE, cursor });
    setMore({ keys: [...more.keys, ...answer.keys], cursor: answer.cursor });
  });
  const keys = [...(asked.data?.keys || []), ...more.keys];
  return html`<div class="row wrap"><input class="prefix" aria-label="Beginning of the key" placeholder="Key begins with…" value=${query.prefix || ""} onInput=${(event) => setQuery({ prefix: event.target.value })} spellcheck=${false} /><${GoTo} service=${service} /></div>
    ${asked.error?.missing ? html`<${RecentKeys} service=${service} />` : asked.error && html`<${Failure} error=${asked.error} retry=${asked.reload} />`}
    ${asked.data && !keys.length && html`<${Empty} icon="objects" title="No keys">${query.prefix ? html`<p>No key begins with “${query.prefix}”.</p>` : html`<p>A key appears when a handler of ${service} runs for it, or when somebody edits its state.</p>`}</${Empty}>`}
    ${keys.length > 0 && html`<section class="card"><div class="scroll-x"><table class="list"><thead><tr><th>Key</th><th>Held by</th><th class="right">Waiting</th><th class="right">Values</th><th class="right">Size</th><th class="right">Promises</th></tr></thead><tbody>
      ${keys.map((each) => html`<tr key=${each.key}><td><a class="mono" href=${href(["objects", service, each.key])}>${each.key}</a></td><td>${each.held_by ? html`<${Id} id=${each.held_by} />` : html`<span class="faint">nobody</span>`}</td><td class="right">${each.waiting ? number(each.waiting) : ""}</td><td class="right">${number(each.values)}</td><td class="right">${bytes(each.bytes)}</td><td class="right">${each.promises ? number(each.promises) : ""}</td></tr>`)}
    </tbody></table></div>${cursor && html`<div class="foot"><button type="button" class="link" onClick=${load}>More keys</button></div>`}</section>`}`;
}

function Queue({ service, objectKey }) {
  const asked = useGet(`/services/${segment(service)}/${segment(objectKey)}/queue`, {}, { kinds: ["invocation"], every: 5000 });
  const older = useGet(asked.error?.missing ? "/invocations" : null, { service, key: objectKey, status: "active", limit: 100 }, { every: 5000 });
  const holder = asked.data?.holder;
  const waiting = asked.data?.waiting || older.data?.invocations.filter((each) => each.status === "queued").reverse() || [];
  const running = older.data?.invocations.filter((each) => each.status !== "queued") || [];
  return html`<section class="card"><header><h2>Queue</h2><span class="muted">${plural(waiting.length, "invocation")}${asked.data?.more ? " and more" : ""} waiting</span></header><div class="body stack">
    ${asked.error && !asked.error.missing && html`<${Failure} error=${asked.error} />`}
    ${holder && html`<p class="row wrap"><span class="muted">Held by</span> ${holder.handler} <${Id} id=${holder.id} /></p>`}
    ${running.map((each) => html`<p class="row wrap"><${Status} of=${statusOf(each)} /> ${each.handler} <${Id} id=${each.id} /></p>`)}
    ${!holder && !running.length && html`<p class="muted">Nobody holds the key.</p>`}
    ${waiting.length > 0 && html`<ol class="queue">${waiting.slice(0, 100).map((each) => html`<li key=${each.id} class="row wrap"><span>${each.handler}</span><${Id} id=${each.id} /><span class="muted"><${Time} at=${each.created_at} /></span></li>`)}</ol>`}</div></section>`;
}

function Promises({ service, objectKey }) {
  const asked = useGet(`/services/${segment(service)}/${segment(objectKey)}/promises`, {}, { every: 5000 });
  const list = asked.data?.promises;
  if (!list?.length) return null;
  return html`<section class="card"><header><h2>Promises</h2></header><div class="scroll-x" tabindex="0"><table class="list"><tbody>${list.map((each) => html`<tr><td class="mono">${each.name}</td><td>${each.completed ? html`<span class="tag good">completed</span>` : html`<span class="tag">waits</span>`}</td><td>${each.outcome && html`<${Json} value=${each.outcome} />`}</td></tr>`)}</tbody></table></div></section>`;
}

function Value({ name, value, save, remove, held }) {
  const [text, setText] = useState(null);
  const [problem, setProblem] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    let parsed;
    try {
      parsed = parse(text);
    } catch (error) {
      setProblem(error.message);
      return;
    }
    if (await save(name, parsed, value)) setText(null);
  };
  return html`<li class="value"><div class="row"><code class="grow"><strong>${name}</strong></code>
      ${save && text === null && html`<button type="button" class="small" disabled=${held} onClick=${() => {
        setProblem("");
        setText(JSON.stringify(value, null, 2));
      }}>Edit</button><button type="button" class="small danger" disabled=${held} onClick=${() => remove(name, value)}>Remove</button>`}</div>
    ${text === null ? html`<${Json} value=${value} />` : html`<form class="stack" onSubmit=${submit}><textarea class="mono" aria-label=${`Value of ${name}`} rows=${Math.min(20, text.split("\n").length + 1)} value=${text} onInput=${(event) => setText(event.target.value)} spellcheck=${false}></textarea>
      ${problem && html`<p class="bad" role="alert">${problem}</p>`}<div class="row"><button type="submit" class="primary small">Save</button><button type="button" class="small" onClick=${() => setText(null)}>Discard</button></div></form>`}</li>`;
}

function One({ service, objectKey }) {
  const path = `/services/${segment(service)}/${segment(objectKey)}/state`;
  const asked = useGet(path, {}, { every: 5000 });
  const [differs, setDiffers] = useState(null);
  const [name, setName] = useState("");
  const change = async (body, expect) => {
    setDiffers(null);
    try {
      await ask("PUT", path, { body: { ...body, expect } });
    } catch (error) {
      if (error.status === 400 && error.message.includes("expect")) {
        // An older node cannot compare: what it has now is compared here, a moment before.
        const current = await get(path);
        const changed = Object.keys(expect).filter((each) => JSON.stringify(current.state[each] ?? null) !== JSON.stringify(expect[each]));
        if (changed.length) {
          setDiffers(changed);
          asked.reload();
          return false;
        }
        if (!(await attempt(() => ask("PUT", path, { body }), "Saved"))) return false;
        asked.reload();
        return true;
      }
      if (error.status === 409 && (error.names.length || error.details.length)) setDiffers(error.names.length ? error.names : error.details);
      else toast([error.message, error.hint].filter(Boolean).join(". "), "worst");
      asked.reload();
      return false;
    }
    toast("Saved");
    asked.reload();
    return true;
  };
  const state = asked.data?.state;
  const editor = may("operate");
  return html`<div class="page"><div class="stack"><div class="crumbs"><a href=${href(["objects"])}>Objects</a><${Icon} name="right" size=${11} /><a href=${href(["objects", service])}>${service}</a></div>
      <div class="page-head"><h1 class="mono key-title">${visible(objectKey)}</h1><${PauseButton} scope=${{ service, key: objectKey }} /><a class="button" href=${href(["invocations"], { service, key: objectKey })}>Invocations</a></div></div>
    ${asked.error && html`<${Failure} error=${asked.error} retry=${asked.reload} />`}
    ${differs && html`<${Notice} kind="worse" icon="warning"><strong>Not saved: it changed meanwhile.</strong> ${differs.join(", ")} now has the value below. Look at it, then edit again.</${Notice}>`}
    ${!state && !asked.error && html`<${Loading} />`}
    ${state && html`<div class="object"><section class="card"><header><h2>State</h2><span class="muted">${plural(Object.keys(state).length, "value")}${asked.data.complete ? "" : ", not all are shown"}</span></header><div class="body stack">
        ${asked.data.held_by && editor && html`<${Notice}>An invocation holds the key, so its state can be edited when it is done.</${Notice}>`}
        ${!Object.keys(state).length && html`<p class="muted">No values.</p>`}
        <ul class="values">${Object.entries(state).map(([each, value]) => html`<${Value} key=${each} held=${Boolean(asked.data.held_by)} name=${each} value=${value} save=${editor ? (its, next, old) => change({ values: { [its]: next } }, { [its]: old }) : null} remove=${(its, old) => change({ remove: [its] }, { [its]: old })} />`)}</ul>
        ${editor && !asked.data.held_by && html`<form class="row" onSubmit=${async (event) => {
          event.preventDefault();
          if (await change({ values: { [name]: null } }, { [name]: null })) setName("");
        }}><input aria-label="Name of a new value" placeholder="Name of a new value" value=${name} onInput=${(event) => setName(event.target.value)} required spellcheck=${false} /><button type="submit"><${Icon} name="plus" />Add</button></form>`}</div></section>
      <div class="stack"><${Queue} service=${service} objectKey=${objectKey} /><${Promises} service=${service} objectKey=${objectKey} /></div></div>`}</div>`;
}

export default function Objects({ path, query }) {
  if (path[2]) return html`<${One} service=${path[1]} objectKey=${path[2]} />`;
  return html`<div class="page"><div>${path[1] && html`<div class="crumbs"><a href=${href(["objects"])}>Objects</a></div>`}<div class="page-head"><h1>${path[1] || "Objects"}</h1></div></div>
    ${path[1] ? html`<${Keys} service=${path[1]} query=${query} />` : html`<${Services} />`}</div>`;
}
