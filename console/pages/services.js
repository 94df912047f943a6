// Services with their handlers, deployments with their health, and a form to try a handler.
import { classes, html, useMemo, useState } from "../lib/ui.js";
import { ask, get, may, post, segment, useGet } from "../lib/api.js";
import { go, href } from "../lib/router.js";
import { number, plural } from "../lib/format.js";
import { ACTIVE, Status } from "../parts/status.js";
import { Code, Empty, Failure, Json, Loading, Notice, Time } from "../parts/basics.js";
import { Dialog, attempt, confirm } from "../parts/dialog.js";
import { PauseButton } from "../parts/pauses.js";
import { TryIt } from "../parts/try_it.js";
import { Icon } from "../parts/icons.js";

const HEALTH = { ok: "good", idle: "", down: "worst", stalled: "worse", crashing: "worse" };
const HEALTH_WORDS = { ok: "up", idle: "idle" };

export const Health = ({ health }) => html`<span class=${`tag ${HEALTH[health.status]}`}>${HEALTH_WORDS[health.status] || health.status}</span>`;

function Register({ close, done }) {
  const [uri, setUri] = useState("");
  const [plan, setPlan] = useState(null);
  const [error, setError] = useState(null);
  const [force, setForce] = useState(false);
  const [busy, setBusy] = useState(false);
  const send = async (dry) => {
    setError(null);
    setBusy(true);
    try {
      const answer = await post("/deployments", {}, { uri: uri.trim(), ...(force && !dry ? { force } : {}), ...(dry ? { dry_run: true } : {}) });
      if (dry) setPlan(answer);
      else done(answer);
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  // An older node refuses the field, and registers nothing.
  const noPlan = error?.status === 400 && error.message.includes("dry_run");
  return html`<${Dialog} title="Register an endpoint" onClose=${close} wide><form onSubmit=${(event) => {
    event.preventDefault();
    send(!plan && !noPlan && !error?.details.length);
  }}>
    <h1>Register an endpoint</h1>
    <label class="field">Address of the endpoint, as the nodes reach it
      <input id="uri" value=${uri} onInput=${(event) => {
        setUri(event.target.value);
        setPlan(null);
        setError(null);
      }} placeholder="http://orders.internal:9080" required autofocus spellcheck=${false} autocomplete="off" /></label>
    ${error && !noPlan && html`<${Failure} error=${error} />`}
    ${noPlan && html`<${Notice}>This node cannot show the changes beforehand. Register anyway?</${Notice}>`}
    ${plan && html`<div class="stack"><strong>${plan.created ? "It would become a new deployment" : "It is already registered"} <code>${plan.id}</code></strong>
      ${plan.changes.length > 0 && html`<ul class="diff">${plan.changes.map((each) => html`<li>${each}</li>`)}</ul>`}
      ${plan.breaks.length > 0 && html`<${Notice} kind="worst" icon="warning"><strong>It breaks callers:</strong><ul>${plan.breaks.map((each) => html`<li>${each}</li>`)}</ul></${Notice}>`}</div>`}
    ${(plan?.breaks.length > 0 || error?.details.length > 0) && html`<label class="check"><input type="checkbox" checked=${force} onChange=${() => setForce(!force)} />Register although it breaks callers</label>`}
    <div class="actions"><button type="button" onClick=${close}>Close</button><button type="submit" class=${`primary ${force ? "danger" : ""}`} disabled=${busy || (plan?.breaks.length > 0 && !force)}>${busy ? "Asking the endpoint…" : plan || noPlan || error?.details.length ? "Register" : "Show what changes"}</button></div>
  </form></${Dialog}>`;
}

function Deployments({ deployments, chosen, reload }) {
  const remove = async (each) => {
    const busy = each.in_flight > 0;
    if (!(await confirm({ title: `Remove ${each.id}?`, text: busy ? `${plural(each.in_flight, "invocation")} on it cannot continue.` : "Nothing runs on it.", word: "remove", matched: Math.max(1, each.in_flight) }))) return;
    await attempt(() => ask("DELETE", `/deployments/${segment(each.id)}`, { query: busy ? { force: true } : {} }), "Removed");
    reload();
  };
  return html`<section class="card"><header><h2>Deployments</h2></header><div class="scroll-x"><table class="list"><thead><tr><th>Endpoint</th><th>Health</th><th>Services</th><th class="right">In flight</th><th>State</th><th>Registered</th><th><span class="hidden-text">Actions</span></th></tr></thead>
    <tbody>${deployments.map((each) => {
      const current = each.services.some((service) => service.current);
      const node = each.health.nodes.find((at) => at.error || at.stall || at.restraint);
      return html`<tr key=${each.id} class=${each.id === chosen ? "chosen" : ""}><td><div>${each.uri}</div><div class="mono faint">${each.id}</div></td>
        <td><${Health} health=${each.health} />${node && html`<div class="bad small-text">${node.error || node.stall || node.restraint}${node.down_since && html`, <${Time} at=${node.down_since} />`}</div>`}</td>
        <td class="names">${each.services.map((service) => html`<a href=${href(["services", service.name])} title=${`revision ${service.revision}`}>${service.name}</a>`)}</td>
        <td class="right"><a href=${href(["invocations"], { deployment: each.id, status: "active" })}>${number(each.in_flight)}</a></td>
        <td>${current ? html`<span class="tag good">active</span>` : each.in_flight ? html`<span class="tag worse">draining</span>` : html`<span class="tag">drained</span>`}</td>
        <td class="nowrap"><${Time} at=${each.created_at} /></td>
        <td class="right">${may("operate") && !current && html`<button type="button" class="small danger" onClick=${() => remove(each)}>Remove</button>`}</td></tr>`;
    })}</tbody></table></div></section>`;
}

function Listing({ query }) {
  const services = useGet("/services", {}, { kinds: ["deployments"], every: 10_000 });
  const deployments = useGet("/deployments", {}, { kinds: ["deployments"], every: 10_000 });
  const [registering, setRegistering] = useState(false);
  const reload = () => {
    services.reload();
    deployments.reload();
  };
  const healthOf = (id) => deployments.data?.deployments.find((each) => each.id === id)?.health;
  const list = services.data?.services;
  return html`<div class="page"><div class="page-head"><h1>Services</h1>${may("operate") && html`<button type="button" class="primary" onClick=${() => setRegistering(true)}><${Icon} name="plus" />Register an endpoint</button>`}</div>
    ${services.error && html`<${Failure} error=${services.error} retry=${reload} />`}
    ${!list && !services.error && html`<${Loading} />`}
    ${list && !list.length && html`<${Empty} icon="services" title="No services yet"><p>Start your handlers, then register their endpoint:</p><${Code} text="holdfast deployments register http://HOST:9080" /></${Empty}>`}
    ${list?.length > 0 && html`<div class="service-cards">${list.map((each) => {
      const health = healthOf(each.deployment);
      return html`<a class="card service" key=${each.name} href=${href(["services", each.name])}><span class="row"><strong class="clip">${each.name}</strong><span class="tag">${each.kind}</span>${each.private && html`<span class="tag">private</span>`}<span class="grow"></span>${health && html`<${Health} health=${health} />`}</span>
        <span class="muted clip">${each.doc || each.handlers.join(", ")}</span>
        <span class="row wrap counts">${ACTIVE.filter((status) => each.invocations[status]).map((status) => html`<span class="row"><${Status} of=${status} quiet /><span>${number(each.invocations[status])}</span></span>`)}
          <span class="muted">${number(each.invocations.completed || 0)} completed</span><span class="grow"></span><span class="faint">revision ${each.revision}</span></span></a>`;
    })}</div>`}
    ${deployments.error && html`<${Failure} error=${deployments.error} />`}
    ${deployments.data?.deployments.length > 0 && html`<${Deployments} deployments=${deployments.data.deployments} chosen=${query.deployment} reload=${reload} />`}
    ${registering && html`<${Register} close=${() => setRegistering(false)} done=${(answer) => {
      setRegistering(false);
      reload();
      go(["services"], { deployment: answer.id });
    }} />`}</div>`;
}

function Schema({ title, of }) {
  return html`<div class="stack schema"><h3>${title} <span class="faint">${of.content_type || ""}</span></h3>${of.schema ? html`<${Json} value=${of.schema} />` : html`<p class="muted">Any value.</p>`}</div>`;
}

function One({ name, query }) {
  const asked = useGet(`/services/${segment(name)}`, {}, { kinds: ["deployments"], every: 10_000 });
  const cluster = useGet("/cluster").data;
  const service = asked.data;
  if (asked.error && !service) return html`<div class="page"><${Failure} error=${asked.error} retry=${asked.reload} /></div>`;
  if (!service) return html`<div class="page"><${Loading} /></div>`;
  const handler = service.handlers.find((each) => each.name === query.handler) || service.handlers[0];
  const totals = service.totals;
  return html`<div class="page"><div class="stack"><div class="crumbs"><a href=${href(["services"])}>Services</a></div><div class="page-head"><h1>${name}</h1><${PauseButton} scope=${{ service: name }} /><a class="button" href=${href(["invocations"], { service: name })}>Invocations</a>${service.kind !== "service" && html`<a class="button" href=${href(["objects", name])}>Keys</a>`}</div>
      <div class="meta"><span class="tag">${service.kind}</span><span>revision ${service.revision}</span><span class="mono muted">${service.uri}</span>
        ${totals && html`<span><strong>${number(totals.invoked)}</strong> <span class="muted">invoked</span></span><span><strong>${number(totals.succeeded)}</strong> <span class="muted">succeeded</span></span><span><strong class=${totals.failed ? "bad" : ""}>${number(totals.failed)}</strong> <span class="muted">failed</span></span><span><strong>${number(totals.attempts_failed ?? 0)}</strong> <span class="muted">failed attempts</span></span>`}</div>
      ${service.doc && html`<p class="muted">${service.doc}</p>`}</div>
    <div class="service-page"><nav class="card handlers" aria-label="Handlers"><header><h2>Handlers</h2></header><ul>${service.handlers.map((each) => html`<li key=${each.name}><a href=${href(["services", name], { handler: each.name })} aria-current=${each === handler ? "true" : undefined}><strong>${each.name}</strong>${each.mode !== "plain" && html` <span class="tag">${each.mode}</span>`}
      <span class="muted clip block">${each.doc || ""}</span></a></li>`)}</ul></nav>
      <div class="stack">
        <section class="card"><header><h2>Try ${handler.name}</h2></header><div class="body"><${TryIt} key=${`${name}/${handler.name}`} service=${service} handler=${handler} cluster=${cluster} /></div></section>
        <section class="card"><header><h2>Schemas</h2></header><div class="body two-columns"><${Schema} title="Input" of=${handler.input} /><${Schema} title="Output" of=${handler.output} /></div></section>
        <section class="card"><header><h2>Revisions</h2></header><div class="scroll-x" tabindex="0"><table class="list"><tbody>${[...service.revisions].reverse().map((each) => html`<tr><td>revision ${each.revision}</td><td class="mono">${each.deployment}</td><td class="mono">${each.uri}</td><td>${each.deployment === service.deployment ? html`<span class="tag good">receives new invocations</span>` : html`<span class="tag">earlier</span>`}</td></tr>`)}</tbody></table></div></section>
      </div></div></div>`;
}

export default function Services({ path, query }) {
  return path[1] ? html`<${One} name=${path[1]} query=${query} />` : html`<${Listing} query=${query} />`;
}
