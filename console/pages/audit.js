// The audit trail: who changed what, when, from where, and how it ended.
import { html, useEffect, useState } from "../lib/ui.js";
import { get, useGet } from "../lib/api.js";
import { href, setQuery } from "../lib/router.js";
import { Empty, Failure, Json, Loading, Notice, Time } from "../parts/basics.js";
import { attempt } from "../parts/dialog.js";

const FIELDS = [["principal", "Who", "a name or id"], ["action", "Action", "kill"], ["outcome", "Outcome", "done, refused, failed"], ["since", "Since", "2h"], ["until", "Until", "10m"]];

const kindOf = (act) => (act.status >= 200 && act.status < 300 ? "good" : act.status === 401 || act.status === 403 ? "worst" : "worse");

function Targets({ targets }) {
  const entries = Object.entries(targets || {});
  if (!entries.length) return null;
  return html`<span class="row wrap targets">${entries.map(([name, value]) => html`<span key=${name}><span class="faint">${name}</span> ${typeof value === "string" && value.startsWith("inv_") ? html`<a class="mono" href=${href(["invocations", value])}>${value.slice(0, 12)}…</a>` : html`<code>${typeof value === "object" ? JSON.stringify(value) : String(value)}</code>`}</span>`)}</span>`;
}

export default function Audit({ query }) {
  const filter = Object.fromEntries(FIELDS.map(([name]) => [name, query[name]]).filter(([, value]) => value));
  const asked = useGet("/audit", { ...filter, limit: 100 }, { every: 10_000 });
  const [more, setMore] = useState({ acts: [], cursor: undefined });
  useEffect(() => setMore({ acts: [], cursor: undefined }), [JSON.stringify(filter)]);
  const cursor = more.cursor === undefined ? asked.data?.cursor : more.cursor;
  const acts = [...(asked.data?.acts || []), ...more.acts.filter((each) => !asked.data?.acts.some((other) => other.sequence === each.sequence))];
  const load = () => attempt(async () => {
    const answer = await get("/audit", { ...filter, limit: 500, cursor });
    setMore({ acts: [...more.acts, ...answer.acts], cursor: answer.cursor });
  });
  return html`<div class="page"><div class="page-head"><h1>Audit</h1></div>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>${FIELDS.map(([name, label, placeholder]) => html`<label class="field" key=${name}>${label}<input value=${query[name] || ""} placeholder=${placeholder} onChange=${(event) => setQuery({ [name]: event.target.value.trim() })} spellcheck=${false} /></label>`)}</form>
    ${asked.error && html`<${Failure} error=${asked.error} retry=${asked.reload} />`}
    ${!asked.data && !asked.error && html`<${Loading} />`}
    ${asked.data && !asked.data.complete && html`<${Notice} kind="worse" icon="warning">Some acts are missing: a node could not record them in time. Its log and the metric holdfast_audit_unrecorded_total say how many.</${Notice}>`}
    ${asked.data && !acts.length && html`<${Empty} icon="audit" title="No acts">${Object.keys(filter).length ? html`<p>No act matches these filters.</p>` : html`<p>Every request that changes something is recorded here once authentication is on (<code>auth = "tokens"</code>).</p>`}</${Empty}>`}
    ${acts.length > 0 && html`<section class="card"><div class="scroll-x"><table class="list"><thead><tr><th>When</th><th>Who</th><th>Action</th><th>On</th><th>Outcome</th><th>From</th></tr></thead><tbody>
      ${acts.map((act) => html`<tr key=${act.sequence}><td class="nowrap"><${Time} at=${act.at} /></td><td><button type="button" class="link" onClick=${() => setQuery({ principal: act.principal?.name || act.principal })}>${act.principal?.name || act.principal}</button></td><td><strong>${act.action}</strong></td><td><${Targets} targets=${act.targets} /></td>
        <td><span class=${`tag ${kindOf(act)}`}>${act.status || "unknown"}${act.error ? ` ${act.error}` : ""}</span></td><td class="mono muted nowrap">${act.address || ""}${act.node ? ` ${act.node}` : ""}</td></tr>`)}
    </tbody></table></div>${cursor && html`<div class="foot"><button type="button" class="link" onClick=${load}>Older acts</button></div>`}</section>`}</div>`;
}
