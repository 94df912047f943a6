// Try a handler: a form made of its JSON schema, and the line for a terminal beside it.
//
// The ingress is another origin, so this page may not call it: the policy of the console allows requests to its own node alone.
// The line is what to run; the invocation shows up in the list.
import { html, useMemo, useState } from "../lib/ui.js";
import { href } from "../lib/router.js";
import { Code, Notice } from "./basics.js";

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
    return html`<label class="field">${label}<input type="number" step=${schema.type === "integer" ? 1 : "any"} value=${value ?? ""} onInput=${(event) => change(event.target.value === "" ? undefined : Number(event.target.value))} />${hint}</label>`;
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
      change(type === "string" ? lines : lines.map(Number));
    }}>${(value || []).join("\n")}</textarea>${hint}</label>`;
  }
  return html`<${Raw} label=${label} value=${value} change=${change} />`;
}

function Raw({ label, value, change }) {
  const [text, setText] = useState(() => JSON.stringify(value ?? null, null, 2));
  const [problem, setProblem] = useState("");
  return html`<label class="field">${label}<textarea class="mono" rows="4" spellcheck=${false} value=${text} onInput=${(event) => {
    setText(event.target.value);
    try {
      change(JSON.parse(event.target.value));
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  }}></textarea>${problem ? html`<span class="hint bad">${problem}</span>` : html`<span class="hint">JSON</span>`}</label>`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function TryIt({ service, handler, cluster }) {
  const root = handler.input.schema;
  const [value, setValue] = useState(() => initial(root, root));
  const [key, setKey] = useState("");
  const [wait, setWait] = useState(true);
  const keyed = service.kind !== "service";
  const node = cluster?.nodes.find((each) => each.name === cluster.answered_by);
  const none = handler.input.content_type === null || handler.input.content_type === "";
  const line = useMemo(() => {
    const path = [service.name, ...(keyed ? [key || "KEY"] : []), handler.name].map(encodeURIComponent).join("/");
    const body = none ? "-X POST" : `--json ${quoted(JSON.stringify(value ?? null))}`;
    return `curl ${node?.ingress_url || "http://NODE:8080"}/${path}${wait ? "" : "/send"} ${body}`;
  }, [service, handler, key, value, wait, node]);
  if (service.private) return html`<${Notice}>This service is private: only other handlers call it.</${Notice}>`;
  return html`<div class="try-it"><div class="stack">
      ${handler.doc && html`<p>${handler.doc}</p>`}
      ${keyed && html`<label class="field">Key<input value=${key} spellcheck=${false} onInput=${(event) => setKey(event.target.value)} placeholder="user-17" /></label>`}
      ${none ? html`<p class="muted">It takes no input.</p>` : html`<${Field} name="input" schema=${root || {}} root=${root} required value=${value} change=${setValue} />`}
      <label class="check"><input type="checkbox" checked=${wait} onChange=${() => setWait(!wait)} />Wait for the result</label></div>
    <div class="stack"><h3>Run it in a terminal</h3><${Code} text=${line} />
      <p class="muted">The ingress is another origin than this page, and the policy of the console allows requests to its own node alone. So the call is a line to copy; with tokens, add <code>-H 'Authorization: Bearer hf_…'</code>.</p>
      <a href=${href(["invocations"], { service: service.name, handler: handler.name })}>Watch its invocations</a></div></div>`;
}
