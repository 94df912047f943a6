// Incident mode: leaders start nothing of a key, a service or everything until somebody resumes it. Everybody sees it on top.
import { html, useEffect, useState } from "../lib/ui.js";
import { ask, may, post, useGet } from "../lib/api.js";
import { store, useStore } from "../lib/store.js";
import { route } from "../lib/router.js";
import { Time } from "./basics.js";
import { Dialog, attempt } from "./dialog.js";
import { Icon } from "./icons.js";

export const pauses = store(null); // of GET /pauses; null: not known, or an older node
const question = store(null);
const SHOWN = 3;
route.watch(() => question.set(null)); // It belongs to the page that asked.

export const askToPause = (scope) => question.set(scope);
const nameOf = ({ service, key }) => (key ? `${service} ${key}` : service || "Everything");
const scopeOf = ({ service, key }) => ({ ...(service && { service }), ...(key && { key }) });
let reload = () => {};

async function resume(scope) {
  await attempt(() => ask("DELETE", "/pauses", { body: scopeOf(scope) }), `${nameOf(scope)} continues`);
  reload();
}

/** The banner of what is paused now. */
export function Pauses() {
  const asked = useGet("/pauses", {}, { kinds: ["cluster"], every: 10_000 });
  reload = asked.reload;
  useEffect(() => {
    if (asked.data) pauses.set(asked.data);
  }, [asked.data]);
  if (!asked.data) return null;
  const standing = [...(asked.data.all ? [asked.data.all] : []), ...asked.data.services, ...asked.data.keys];
  if (!standing.length) return null;
  return html`<div class="banner calm" role="status"><${Icon} name="pause" /><div class="grow">${standing.slice(0, SHOWN).map((each) => html`<div class="row wrap"><strong>${nameOf(each)} is paused</strong>
      <span>${each.reason}${each.by ? `, ${each.by}` : ""}${each.since ? html`, <${Time} at=${each.since} />` : ""}</span>${may("operate") && html`<button type="button" class="link" onClick=${() => resume(each)}>Resume</button>`}</div>`)}
    ${standing.length > SHOWN && html`<div>and ${standing.length - SHOWN} more</div>`}</div></div>`;
}

export function PauseButton({ scope }) {
  const known = useStore(pauses);
  if (!known || !may("operate")) return null;
  const all = scope.key ? known.keys : known.services;
  const standing = all.find((each) => each.service === scope.service && (!scope.key || each.key === scope.key));
  return standing ? html`<button type="button" onClick=${() => resume(scope)}><${Icon} name="play" size=${13} />Resume</button>`
    : html`<button type="button" onClick=${() => askToPause(scope)}><${Icon} name="pause" size=${13} />Pause</button>`;
}

export function PauseQuestion() {
  const scope = useStore(question);
  const [reason, setReason] = useState("");
  const [stop, setStop] = useState(false);
  if (!scope) return null;
  const close = () => question.set(null);
  const submit = async (event) => {
    event.preventDefault();
    if (!(await attempt(() => post("/pauses", {}, { ...scopeOf(scope), reason: reason.trim(), ...(stop && { stop }) }), `${nameOf(scope)} is paused`))) return;
    setReason("");
    close();
    reload();
  };
  const what = scope.key ? `the key ${scope.key} of ${scope.service}` : scope.service || "everything";
  return html`<${Dialog} title=${`Pause ${what}`} onClose=${close}><form onSubmit=${submit}><h1>Pause ${what}?</h1>
    <p>No attempt of it starts until somebody resumes it. Requests are still accepted, and wait.</p>
    <label class="field">Why <input value=${reason} onInput=${(event) => setReason(event.target.value)} placeholder="everybody sees this" maxlength="500" required autofocus /></label>
    <label class="check"><input type="checkbox" checked=${stop} onChange=${() => setStop(!stop)} />Also ask attempts that run to suspend</label>
    <div class="actions"><button type="button" onClick=${close}>Keep it running</button><button type="submit" class="primary danger">Pause</button></div></form></${Dialog}>`;
}
