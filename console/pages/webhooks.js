// Webhooks: which addresses the cluster tells about what, and how that goes.
import { html, useState } from "../lib/ui.js";
import { ask, post, segment, useGet } from "../lib/api.js";
import { number, plural } from "../lib/format.js";
import { Code, Empty, Failure, Loading, Notice, Time } from "../parts/basics.js";
import { Dialog, attempt, confirm, toast } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";

const EVENTS = [["failed", "an invocation failed"], ["paused", "an invocation was paused and needs somebody"], ["in-doubt", "a step is in doubt and needs a decision"], ["approval-requested", "somebody is asked for an approval"], ["approval-reminder", "an approval has waited for long"], ["completed", "an invocation completed, however"]];

function Create({ close, done }) {
  const [url, setUrl] = useState("");
  const [events, setEvents] = useState(["failed", "paused", "in-doubt"]);
  const [services, setServices] = useState("");
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    const only = services.split(/[\s,]+/).filter(Boolean);
    try {
      done(await post("/webhooks", {}, { url: url.trim(), events, ...(only.length ? { services: only } : {}) }));
    } catch (problem) {
      setError(problem);
    }
  };
  const toggle = (name) => setEvents(events.includes(name) ? events.filter((each) => each !== name) : [...events, name]);
  return html`<${Dialog} title="Create a webhook" onClose=${close}><form onSubmit=${submit}><h1>Create a webhook</h1>
    <label class="field">Address that receives the events<input id="webhook-url" type="url" value=${url} onInput=${(event) => setUrl(event.target.value)} placeholder="https://alerts.internal/holdfast" required autofocus spellcheck=${false} /></label>
    <fieldset><legend><strong>Tell it when</strong></legend>${EVENTS.map(([name, what]) => html`<label class="check" key=${name}><input type="checkbox" checked=${events.includes(name)} onChange=${() => toggle(name)} />${what}</label>`)}</fieldset>
    <label class="field">Only of these services <span class="hint">none: all</span><input value=${services} onInput=${(event) => setServices(event.target.value)} placeholder="orders, carts" spellcheck=${false} /></label>
    ${error && html`<${Failure} error=${error} what="Webhooks" />`}
    <div class="actions"><button type="button" onClick=${close}>Close</button><button type="submit" class="primary" disabled=${!events.length}>Create</button></div></form></${Dialog}>`;
}

function Secret({ made, close }) {
  return html`<${Dialog} title="The secret" onClose=${close} wide><div class="dialog-body"><h1>The secret of ${made.url}</h1>
    <${Notice} kind="worse" icon="warning">It is shown once. The receiver checks the signature of each event with it.</${Notice}><${Code} text=${made.secret} />
    <div class="actions"><button type="button" class="primary" onClick=${close} autofocus>It is kept safe</button></div></div></${Dialog}>`;
}

function Faring({ hook }) {
  if (hook.failing_since) {
    return html`<span class="tag worst">failing</span> <${Time} at=${hook.failing_since} /><div class="bad small-text">${hook.last_error}</div>${hook.next_try_at && html`<div class="muted small-text">next try <${Time} at=${hook.next_try_at} /></div>`}`;
  }
  return hook.last_success_at ? html`<span class="tag good">delivers</span> <${Time} at=${hook.last_success_at} />` : html`<span class="tag">nothing sent yet</span>`;
}

export default function Webhooks() {
  const asked = useGet("/webhooks", {}, { every: 5000 });
  const [creating, setCreating] = useState(false);
  const [made, setMade] = useState(null);
  const test = async (hook) => {
    const answer = await attempt(() => post(`/webhooks/${segment(hook.id)}/test`));
    if (answer) toast(answer.taken ? `The receiver took the test event (${answer.status})` : `The receiver did not take it: ${answer.error}`, answer.taken ? "good" : "worst");
    asked.reload();
  };
  const remove = async (hook) => {
    if (!(await confirm({ title: `Delete the webhook to ${hook.url}?`, text: hook.pending ? `${plural(hook.pending, "event")} that wait for it are lost.` : "Nothing waits for it.", word: "delete" }))) return;
    await attempt(() => ask("DELETE", `/webhooks/${segment(hook.id)}`), "Deleted");
    asked.reload();
  };
  const list = asked.data?.webhooks;
  return html`<div class="page"><div class="page-head"><h1>Webhooks</h1>${!asked.error && html`<button type="button" class="primary" onClick=${() => setCreating(true)}><${Icon} name="plus" />Create a webhook</button>`}</div>
    ${asked.error && html`<${Failure} error=${asked.error} what="This page" retry=${asked.reload} />`}
    ${!list && !asked.error && html`<${Loading} />`}
    ${list && !list.length && html`<${Empty} icon="webhooks" title="No webhooks"><p>The cluster can tell an address of yours when invocations fail, pause or complete: signed, at least once, and again until the receiver takes it.</p></${Empty}>`}
    ${list?.length > 0 && html`<section class="card"><div class="scroll-x"><table class="list"><thead><tr><th>Address</th><th>Events</th><th>Services</th><th>Deliveries</th><th class="right">Delivered</th><th class="right">Waiting</th><th class="right">Dropped</th><th><span class="hidden-text">Actions</span></th></tr></thead><tbody>
      ${list.map((hook) => html`<tr key=${hook.id}><td><div>${hook.url}</div><div class="mono faint">${hook.id}</div></td><td>${hook.events.map((each) => html`<span class="tag">${each}</span> `)}</td><td>${hook.services.length ? hook.services.join(", ") : html`<span class="faint">all</span>`}</td>
        <td><${Faring} hook=${hook} /></td><td class="right">${number(hook.delivered)}</td><td class="right">${number(hook.pending)}</td><td class=${hook.dropped ? "right bad" : "right"}>${number(hook.dropped)}</td>
        <td class="right nowrap"><button type="button" class="small" onClick=${() => test(hook)}>Test</button> <button type="button" class="small danger" onClick=${() => remove(hook)}>Delete</button></td></tr>`)}
    </tbody></table></div></section>`}
    ${creating && html`<${Create} close=${() => setCreating(false)} done=${(answer) => {
      setCreating(false);
      setMade(answer);
      asked.reload();
    }} />`}
    ${made && html`<${Secret} made=${made} close=${() => setMade(null)} />`}</div>`;
}
