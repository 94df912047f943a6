// Tokens: who may do what. A secret is shown once, when it is made.
import { html, useState } from "../lib/ui.js";
import { ask, post, segment, session, useGet } from "../lib/api.js";
import { Code, Empty, Failure, Loading, Notice, Time } from "../parts/basics.js";
import { Dialog, attempt, confirm } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";

const ROLES = [["read", "see everything but secrets"], ["invoke", "call handlers at the ingress"], ["approve", "read, and decide steps in doubt"], ["operate", "approve, and act on invocations, deployments and nodes"], ["admin", "everything, tokens and the audit trail included"]];

function Secret({ made, close }) {
  return html`<${Dialog} title="The secret" onClose=${close} wide><div class="dialog-body"><h1>The token of ${made.name}</h1><${Notice} kind="worse" icon="warning">It is shown once. The cluster stores only a digest of it.</${Notice}>
    <${Code} text=${made.token} /><div class="actions"><button type="button" class="primary" onClick=${close} autofocus>It is kept safe</button></div></div></${Dialog}>`;
}

function Create({ close, done }) {
  const [name, setName] = useState("");
  const [roles, setRoles] = useState(["read"]);
  const [services, setServices] = useState("");
  const [expires, setExpires] = useState("90d");
  const submit = async (event) => {
    event.preventDefault();
    const only = services.split(/[\s,]+/).filter(Boolean);
    const made = await attempt(() => post("/tokens", {}, { name: name.trim(), roles, ...(only.length && roles.includes("invoke") ? { services: only } : {}), ...(expires ? { expires_in: expires } : {}) }));
    if (made) done(made);
  };
  return html`<${Dialog} title="Create a token" onClose=${close}><form onSubmit=${submit}><h1>Create a token</h1>
    <label class="field">For whom<input value=${name} onInput=${(event) => setName(event.target.value)} placeholder="a person or a program" required autofocus /></label>
    <fieldset><legend><strong>Roles</strong></legend>${ROLES.map(([role, what]) => html`<label class="check" key=${role}><input type="checkbox" checked=${roles.includes(role)} onChange=${() => setRoles(roles.includes(role) ? roles.filter((each) => each !== role) : [...roles, role])} /><span><strong>${role}</strong> <span class="muted">${what}</span></span></label>`)}</fieldset>
    ${roles.includes("invoke") && html`<label class="field">Only these services <span class="hint">none: all</span><input value=${services} onInput=${(event) => setServices(event.target.value)} placeholder="orders, carts" /></label>`}
    <label class="field">Expires after<select value=${expires} onChange=${(event) => setExpires(event.target.value)}><option value="12h">12 hours</option><option value="30d">30 days</option><option value="90d">90 days</option><option value="365d">a year</option><option value="">never</option></select></label>
    <div class="actions"><button type="button" onClick=${close}>Close</button><button type="submit" class="primary" disabled=${!roles.length}>Create</button></div></form></${Dialog}>`;
}

export default function Tokens() {
  const asked = useGet("/tokens");
  const [creating, setCreating] = useState(false);
  const [made, setMade] = useState(null);
  const rotate = async (token) => {
    if (!(await confirm({ title: `Rotate the token of ${token.name}?`, text: "It gets a new secret. The present one stays valid for an hour.", word: "rotate" }))) return;
    const answer = await attempt(() => post(`/tokens/${segment(token.id)}/rotate`, {}, { keep_old: "1h" }));
    if (answer) setMade({ ...answer, name: token.name });
    asked.reload();
  };
  const revoke = async (token) => {
    if (!(await confirm({ title: `Revoke the token of ${token.name}?`, text: "Requests with it are refused at once, and its sessions end.", word: "revoke" }))) return;
    await attempt(() => ask("DELETE", `/tokens/${segment(token.id)}`), "Revoked");
    asked.reload();
  };
  const list = asked.data?.tokens;
  const open = session.get() && !session.get().asks_for_tokens;
  return html`<div class="page"><div class="page-head"><h1>Tokens</h1><button type="button" class="primary" onClick=${() => setCreating(true)}><${Icon} name="plus" />Create a token</button></div>
    ${open && html`<${Notice} kind="worse" icon="warning">This node asks for no tokens: everybody who reaches it may do everything. Set <code>auth = "tokens"</code> on every node.</${Notice}>`}
    ${asked.error && html`<${Failure} error=${asked.error} retry=${asked.reload} />`}
    ${!list && !asked.error && html`<${Loading} />`}
    ${list && !list.length && html`<${Empty} icon="tokens" title="No tokens"><p>One token per person and program makes the audit trail useful, and revoking easy.</p></${Empty}>`}
    ${list?.length > 0 && html`<section class="card"><div class="scroll-x"><table class="list"><thead><tr><th>For</th><th>Roles</th><th>Services</th><th>Created</th><th>Last used</th><th>Expires</th><th><span class="hidden-text">Actions</span></th></tr></thead><tbody>
      ${list.map((token) => html`<tr key=${token.id}><td><strong>${token.name}</strong><div class="mono faint">${token.id}</div></td><td>${token.roles.map((role) => html`<span class="tag">${role}</span> `)}</td><td>${token.services?.length ? token.services.join(", ") : html`<span class="faint">all</span>`}</td>
        <td class="nowrap"><${Time} at=${token.created_at} /></td><td class="nowrap"><${Time} at=${token.last_used_at || token.used_at} /></td><td class="nowrap">${token.expires_at ? html`<${Time} at=${token.expires_at} />` : html`<span class="faint">never</span>`}</td>
        <td class="right nowrap"><button type="button" class="small" onClick=${() => rotate(token)}>Rotate</button> <button type="button" class="small danger" onClick=${() => revoke(token)}>Revoke</button></td></tr>`)}
    </tbody></table></div></section>`}
    ${creating && html`<${Create} close=${() => setCreating(false)} done=${(answer) => {
      setCreating(false);
      setMade(answer);
      asked.reload();
    }} />`}
    ${made && html`<${Secret} made=${made} close=${() => setMade(null)} />`}</div>`;
}
