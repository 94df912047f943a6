// Try a handler: a form made of its JSON schema that starts an invocation and shows what comes of it, and the line for a terminal.
//
// The ingress is another origin, so this page may not call it. The admin API starts the invocation in its place.
import { html, useMemo, useState } from "../lib/ui.js";
import { mayInvoke, post, segment, useGet } from "../lib/api.js";
import { useStore } from "../lib/store.js";
import { href } from "../lib/router.js";
import { duration, ms, now } from "../lib/format.js";
import { digits, parse } from "../lib/json.js";
import { Code, Failure, Id, Json, Notice } from "./basics.js";
import { Status, statusOf } from "./status.js";
import { Icon } from "./icons.js";

const DEPTH_MAX = 6;

/** The schema without references: local definitions are looked up, optional types are unwrapped. */
export function resolve(schema, root, depth = 0) {
  if (!schema || typeof schema !== "object" || depth > DEPTH_MAX) return {};
  if (schema.$ref?.startsWith("#/")) {
    const target = schema.$ref.slice(2).split("/").reduce((at, name) => at?.[name.replaceAll("~1", "/").replaceAll("~0", "~")], root);
    return resolve({ ...target, ...Object.fromEntries(Object.entries(schema).filter(([name]) => name !== "$ref")) }, root, depth + 1);
  }
  const choices = schema.anyOf || schema.oneOf;
  if (choices) {
    const real = choices.filter((each) => each.type !== "null");
    if (real.length === 1) return { ...resolve(real[0], root, depth + 1), nullable: choices.length > 1, ...(schema.default !== undefined && { default: schema.default }) };
    return {};
  }
  if (Array.isArray(schema.type)) {
    const types = schema.type.filter((each) => each !== "null");
    return types.length === 1 ? { ...schema, type: types[0], nullable: true } : {};
  }
  return schema;
}

export function initial(given, root, depth = 0) {
  const schema = resolve(given, root);
  if (schema.default !== undefined) return schema.default;
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum[0];
  if (schema.type === "object" && schema.properties && depth < DEPTH_MAX) {
    const required = new Set(schema.required || []);
    return Object.fromEntries(Object.entries(schema.properties).filter(([name]) => required.has(name)).map(([name, each]) => [name, initial(each, root, depth + 1)]));
  }
  return { string: "", number: 0, integer: 0, boolean: false, array: [], object: {} }[schema.type] ?? null;
}

/** With all of its digits if it is a whole number. */
const numberOf = (text) => (/^-?(0|[1-9]\d*)$/.test(text) ? parse(text) : Number(text));

function Field({ schema: given, root, value, change, name, required, depth = 0 }) {
  const schema = resolve(given, root);
  const id = `try-${name}-${depth}`;
  const hint = schema.description && html`<span class="hint">${schema.description}</span>`;
  const label = html`<span>${name}${required ? "" : html` <span class="faint">optional</span>`}</span>`;
  if (schema.enum) {
    return html`<label class="field">${label}<select id=${id} value=${JSON.stringify(value)} onChange=${(event) => change(event.target.value === "" ? undefined : JSON.parse(event.target.value))}>
      ${!required && html`<option value=""></option>`}${schema.enum.map((each) => html`<option value=${JSON.stringify(each)}>${String(each)}</option>`)}</select>${hint}</label>`;
  }
  if (schema.type === "boolean") return html`<label class="check"><input type="checkbox" checked=${value === true} onChange=${(event) => change(event.target.checked)} />${label}</label>`;
  if (schema.type === "number" || schema.type === "integer") {
    return html`<label class="field">${label}<input type="number" step=${schema.type === "integer" ? 1 : "any"} value=${digits(value) ?? ""} onInput=${(event) => change(event.target.value === "" ? undefined : numberOf(event.target.value))} />${hint}</label>`;
  }
  if (schema.type === "string") {
    return html`<label class="field">${label}<input value=${value ?? ""} spellcheck=${false} onInput=${(event) => change(event.target.value === "" && !required ? undefined : event.target.value)} />${hint}</label>`;
  }
  if (schema.type === "object" && schema.properties && depth < 3) {
    const own = value && typeof value === "object" ? value : {};
    return html`<fieldset class=${depth ? "nested" : "top-level"}>${depth > 0 && html`<legend>${label}</legend>`}${Object.entries(schema.properties).map(([each, its]) => html`<${Field} key=${each} name=${each} schema=${its} root=${root} depth=${depth + 1} required=${(schema.required || []).includes(each)} value=${own[each]}
      change=${(next) => {
        const changed = { ...own, [each]: next };
        if (next === undefined) delete changed[each];
        change(changed);
      }} />`)}</fieldset>`;
  }
  if (schema.type === "array" && ["string", "number", "integer"].includes(resolve(schema.items, root).type)) {
    const type = resolve(schema.items, root).type;
    return html`<label class="field">${label}<textarea rows="2" placeholder="one per line" spellcheck=${false} onInput=${(event) => {
      const lines = event.target.value.split("\n").filter((each) => each !== "");
      change(type === "string" ? lines : lines.map(numberOf));
    }}>${(value || []).map(digits).join("\n")}</textarea>${hint}</label>`;
  }
  return html`<${Raw} label=${label} value=${value} change=${change} />`;
}

/** A form with invalid JSON in it is not sent. */
function Raw({ label, value, change }) {
  const [text, setText] = useState(() => JSON.stringify(value ?? null, null, 2));
  const [problem, setProblem] = useState("");
  const read = (event) => {
    setText(event.target.value);
    let found = "";
    try {
      change(parse(event.target.value));
    } catch (error) {
      found = error.message;
    }
    event.target.setCustomValidity(found && `This is not JSON: ${found}`);
    setProblem(found);
  };
  return html`<label class="field">${label}<textarea class="mono" rows="4" spellcheck=${false} value=${text} onInput=${read}></textarea>${problem ? html`<span class="hint bad">${problem}</span>` : html`<span class="hint">JSON</span>`}</label>`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const inBase64 = (text) => ({ base64: btoa(String.fromCharCode(...new TextEncoder().encode(text))) });
/** As the admin API reads it: an object with `base64` alone would be bytes. */
const inputOf = (value) => (value && typeof value === "object" && Object.keys(value).join() === "base64" ? inBase64(JSON.stringify(value)) : value ?? null);

/** The invocation that was started, until it has completed. */
function Started({ id, again }) {
  const { data, error } = useGet(`/invocations/${segment(id)}`, {}, { kinds: ["invocation"], filter: { id } });
  const at = useStore(now);
  const completed = data?.status === "completed";
  const outcome = data?.outcome;
  return html`<section class="started card" aria-live="polite" data-invocation=${id}>
    <header>${data ? html`<${Status} of=${statusOf(data)} />` : html`<span class="muted">accepted</span>`}<span class="grow"><${Id} id=${id} /></span>
      ${data && html`<span class="muted">${duration((completed ? ms(data.completed_at || data.since) : at) - ms(data.created_at))}</span>`}</header>
    <div class="body stack">${error ? html`<${Failure} error=${error} />` : null}
      ${again && html`<p class="muted">This idempotency key was used before: it is the invocation from then.</p>`}
      ${!completed ? html`<p class="muted">${data?.why_not_running || "It goes on. Its outcome is shown here."}</p>`
        : outcome?.failure ? html`<p class="bad">${outcome.failure.message}</p><p class="muted">${[outcome.failure.code, outcome.failure.kind].filter(Boolean).join(" ")}</p>` : html`<${Json} value=${outcome?.value ?? null} />`}
      <div><a href=${href(["invocations", id])}>Open the invocation</a></div></div></section>`;
}

export function TryIt({ service, handler, cluster }) {
  const root = handler.input.schema;
  const type = handler.input.content_type;
  const none = !type;
  const json = none || type.includes("json");
  const [value, setValue] = useState(() => (json ? initial(root, root) : ""));
  const [key, setKey] = useState("");
  const [delay, setDelay] = useState("");
  const [once, setOnce] = useState("");
  const [wait, setWait] = useState(true);
  const [started, setStarted] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const keyed = service.kind !== "service";
  const node = cluster?.nodes.find((each) => each.name === cluster.answered_by);
  const line = useMemo(() => {
    const path = [service.name, ...(keyed ? [key || "KEY"] : []), handler.name].map(encodeURIComponent).join("/");
    const body = none ? "-X POST" : json ? `--json ${quoted(JSON.stringify(value ?? null))}` : `-H ${quoted(`Content-Type: ${type}`)} --data-binary ${quoted(value)}`;
    const header = once ? ` -H ${quoted(`Idempotency-Key: ${once}`)}` : "";
    const send = delay ? `/send?delay=${encodeURIComponent(delay)}` : wait ? "" : "/send";
    return `curl ${node?.ingress_url || "http://NODE:8080"}/${path}${send}${header} ${body}`;
  }, [service, handler, key, value, wait, node, once, delay]);
  if (service.private) return html`<${Notice}>This service is private: only other handlers call it.</${Notice}>`;
  const call = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    const input = none ? {} : json ? { input: inputOf(value) } : { input: inBase64(value), headers: { "content-type": type } };
    const more = { ...(keyed && { key }), ...(once && { idempotency_key: once }), ...(delay && { delay }) };
    try {
      setStarted(await post("/invocations", {}, { service: service.name, handler: handler.name, ...input, ...more }));
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  const allowed = mayInvoke(service.name);
  return html`<div class="try-it"><form class="stack" onSubmit=${call}>
      ${handler.doc && html`<p>${handler.doc}</p>`}
      ${keyed && html`<label class="field">Key<input name="key" value=${key} required spellcheck=${false} onInput=${(event) => setKey(event.target.value)} placeholder="user-17" /></label>`}
      ${none ? html`<p class="muted">It takes no input.</p>` : json ? html`<${Field} name="input" schema=${root || {}} root=${root} required value=${value} change=${setValue} />`
        : html`<label class="field">Input<textarea class="mono" rows="4" value=${value} onInput=${(event) => setValue(event.target.value)}></textarea><span class="hint">${type}</span></label>`}
      <details class="more"><summary>Delay, idempotency</summary><div class="two-columns">
        <label class="field">Start after<input value=${delay} onInput=${(event) => setDelay(event.target.value.trim())} placeholder="10s, 2h" /></label>
        <label class="field">Idempotency key<input value=${once} spellcheck=${false} onInput=${(event) => setOnce(event.target.value)} placeholder="runs once per key" /></label></div></details>
      ${allowed ? html`<div><button type="submit" id="call" class="primary" disabled=${busy}><${Icon} name="play" size=${13} />${busy ? "Calling…" : `Call ${handler.name}`}</button></div>`
        : html`<p class="muted">Your token may not call this: that needs the role invoke.</p>`}
      </form>
    <div class="stack">${error && html`<${Failure} error=${error} />`}
      ${started && html`<${Started} key=${started.invocationId} id=${started.invocationId} again=${started.status === "PreviouslyAccepted"} />`}
      <h3>In a terminal</h3><${Code} text=${line} />
      <div class="row wrap">${!delay && html`<label class="check"><input type="checkbox" checked=${wait} onChange=${() => setWait(!wait)} />Wait for the result</label>`}<span class="grow"></span>
        <a href=${href(["invocations"], { service: service.name, handler: handler.name })}>All its invocations</a></div></div></div>`;
}
