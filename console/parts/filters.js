// The filter builder of the list of invocations: what is chosen is in the address.
import { html, useLayoutEffect, useRef, useState } from "../lib/ui.js";
import { setQuery } from "../lib/router.js";
import { Icon } from "./icons.js";
import { Menu } from "./basics.js";

/** name of the parameter: [label, hint, placeholder] */
export const FIELDS = {
  service: ["Service", "its name", ""],
  handler: ["Handler", "its name", ""],
  key: ["Key", "the whole key", "user-17"],
  key_prefix: ["Key begins with", "the beginning of the key", "user-"],
  since: ["Created since", "a time, or a duration before now", "2h"],
  until: ["Created before", "a time, or a duration before now", "10m"],
  completed_since: ["Completed since", "a time, or a duration before now", "1h"],
  completed_until: ["Completed before", "a time, or a duration before now", "10m"],
  failure: ["Failure contains", "part of its message or kind", "connection refused"],
  failure_code: ["Failure code", "400 to 599", "503"],
  deployment: ["Deployment", "its id", "dp_…"],
  idempotency_key: ["Idempotency key", "the whole key", ""],
  parent: ["Called by", "id of the caller", "inv_…"],
  root: ["Tree below", "id of its root", "inv_…"],
  tag: ["Tag", "its name = its value", "tenant=acme"],
  order: ["Order", "newest or oldest first", "oldest"],
};
export const NAMES = ["status", "outcome", ...Object.keys(FIELDS)];

export function filterOf(query) {
  return Object.fromEntries(NAMES.filter((name) => query[name]).map((name) => [name, query[name]]));
}

function options(name, query, services) {
  if (name === "service") return services.map((each) => each.name);
  if (name === "order") return ["newest", "oldest"];
  if (name === "handler") return [...new Set(services.filter((each) => !query.service || each.name === query.service).flatMap((each) => each.handlers))];
  return null;
}

function Value({ name, query, services, done }) {
  const field = useRef(null);
  const [label, hint, placeholder] = FIELDS[name];
  const known = options(name, query, services);
  useLayoutEffect(() => field.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    setQuery({ [name]: field.current.value.trim() });
    done();
  };
  return html`<form onSubmit=${submit}><label for="filter-value">${label}</label>
    ${known?.length ? html`<select id="filter-value" ref=${field}>${known.map((each) => html`<option selected=${each === query[name]}>${each}</option>`)}</select>`
      : html`<input id="filter-value" ref=${field} value=${query[name] || ""} placeholder=${placeholder} autocomplete="off" spellcheck=${false} required />`}
    <span class="muted">${hint}</span><button type="submit" class="primary">Add</button></form>`;
}

function Chooser({ query, services, done }) {
  const [name, choose] = useState("");
  const first = useRef(null);
  useLayoutEffect(() => first.current?.focus(), []);
  if (name) return html`<${Value} name=${name} query=${query} services=${services} done=${done} />`;
  return Object.entries(FIELDS).filter(([each]) => !query[each]).map(([each, [label]], at) => html`<button type="button" ref=${at ? undefined : first} onClick=${() => choose(each)}>${label}</button>`);
}

export function Filters({ query, services }) {
  const set = Object.keys(FIELDS).filter((name) => query[name]);
  return html`<div class="chips" role="group" aria-label="Filters">
    ${set.map((name) => html`<span class="chip" key=${name}><span><span class="muted">${FIELDS[name][0]}</span> ${query[name]}</span>
      <button type="button" aria-label=${`Remove the filter ${FIELDS[name][0]}`} onClick=${() => setQuery({ [name]: "" })}><${Icon} name="cross" size=${12} /></button></span>`)}
    <${Menu} cls="small" icon="plus" label=${html`<span id="add-filter">Filter</span>`}>${(close) => html`<${Chooser} query=${query} services=${services} done=${close} />`}</${Menu}>
    ${set.length > 1 && html`<button type="button" class="link" onClick=${() => setQuery(Object.fromEntries(set.map((name) => [name, ""])))}>Clear</button>`}
  </div>`;
}
