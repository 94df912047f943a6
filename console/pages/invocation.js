// One invocation: what it is, why it waits, what it did when, and what an operator may do about it.
import { classes, html, useCallback, useEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { get, may, post, segment, useGet, useReturn } from "../lib/api.js";
import { useStore } from "../lib/store.js";
import { onChange } from "../lib/live.js";
import { go, href, setQuery } from "../lib/router.js";
import { bytes, duration, exact, ms, now, number, plural } from "../lib/format.js";
import { useKeys } from "../lib/keys.js";
import { Status, statusOf } from "../parts/status.js";
import { Code, Failure, Id, Json, Loading, Menu, Notice, Time, Empty } from "../parts/basics.js";
import { ACTIONS, actOnOne, fits } from "../parts/actions.js";
import { Waterfall, failed, kindOf, nameOf } from "../parts/waterfall.js";
import { Step, decidable } from "../parts/step.js";
import { Icon } from "../parts/icons.js";

const STEPS_MAX = 10_000;

function useJournal(id, version) {
  const [state, set] = useState({ steps: null, error: null, complete: true });
  const run = useRef(0);
  const load = useCallback(async () => {
    const mine = (run.current += 1);
    try {
      const steps = [];
      let start = 0;
      while (start !== null && steps.length < STEPS_MAX) {
        const answer = await get(`/invocations/${segment(id)}/journal`, { start });
        steps.push(...answer.steps);
        start = answer.next;
      }
      if (run.current === mine) set({ steps, error: null, complete: start === null });
    } catch (error) {
      if (run.current === mine) set((old) => ({ ...old, error }));
    }
  }, [id]);
  useEffect(() => {
    load();
    return () => (run.current += 1);
  }, [load, version]);
  useReturn(load);
  return state;
}

function Actions({ invocation, reload }) {
  if (!may("operate")) return null;
  const act = async (action, query) => {
    const answer = await actOnOne(action, invocation, query);
    if (answer?.new_id) go(["invocations", answer.new_id]);
    else if (answer && action === "purge") go(["invocations"]);
    else if (answer) reload();
  };
  const possible = Object.keys(ACTIONS).filter((action) => fits(action, invocation.status));
  const front = possible.filter((action) => ["cancel", "resume"].includes(action) || (action === "restart" && invocation.status === "completed"));
  const rest = possible.filter((action) => !front.includes(action));
  const paused = invocation.status === "paused";
  return html`<div class="row wrap" id="actions">
    ${front.map((action) => html`<button type="button" key=${action} data-action=${action} class=${action === "resume" ? "primary" : ""} onClick=${() => act(action)}>${action === "resume" && paused ? "Resume" : ACTIONS[action][0]}</button>`)}
    ${rest.length > 0 && html`<${Menu} icon="more" toRight label=${html`<span class="hidden-text">More actions</span>`}>${(close) => html`
      ${rest.map((action) => html`<button type="button" key=${action} data-action=${action} class=${ACTIONS[action][3] ? "danger" : ""} onClick=${() => {
        close();
        act(action);
      }}>${ACTIONS[action][0]}</button>`)}
      ${paused && html`<button type="button" onClick=${() => {
        close();
        act("resume", { to: "newest" });
      }}>Resume on the newest deployment</button>`}`}</${Menu}>`}
  </div>`;
}

function Why({ invocation }) {
  const { status, why_not_running: why, last_failure: failure } = invocation;
  const at = useStore(now);
  if (status === "completed") {
    const outcome = invocation.outcome;
    if (!outcome?.failure) return null;
    const asked = ["cancelled", "killed"].includes(invocation.end); // Somebody wanted this end.
    return html`<${Notice} kind=${asked ? "" : "worst"} icon=${asked ? "info" : "warning"}><strong>${outcome.failure.message}</strong><div class="muted">${[outcome.failure.code, outcome.failure.kind].filter(Boolean).join(" ")}</div>${outcome.failure.trace && html`<${Trace} lines=${outcome.failure.trace} />`}</${Notice}>`;
  }
  if (!why && !invocation.cancelling) return null;
  const kind = status === "paused" ? "worst" : status === "backing-off" ? "worse" : "";
  const next = invocation.next_attempt_at && ms(invocation.next_attempt_at) - at;
  return html`<${Notice} kind=${kind} icon=${kind ? "warning" : "info"}>
    ${invocation.cancelling && html`<div><strong>It is being cancelled.</strong></div>`}
    <div id="why">${why}</div>
    ${next > 0 && html`<div class="muted">Next attempt in ${duration(next)}.</div>`}
    ${failure?.trace && html`<${Trace} lines=${failure.trace} />`}</${Notice}>`;
}

const Trace = ({ lines }) => html`<ol class="mono trace">${lines.map((line) => html`<li>${line}</li>`)}</ol>`;

function Head({ invocation, last, reload }) {
  const status = statusOf(invocation);
  const by = invocation.called_by;
  return html`<header class="one-head stack">
    <div class="crumbs"><a href=${href(["invocations"])}>Invocations</a><${Icon} name="right" size=${11} /><${Id} id=${invocation.id} plain whole /></div>
    <div class="page-head"><h1>${invocation.service}<span class="faint">/</span>${invocation.handler}${invocation.key && html` <span class="mono one-key">${invocation.key}</span>`}</h1>
      <${Actions} invocation=${invocation} reload=${reload} /></div>
    <div class="meta">
      <span id="status"><${Status} of=${status} /></span>
      <span><span class="muted">created</span> <${Time} at=${invocation.created_at} /></span>
      <span><span class="muted">${invocation.status === "completed" ? "took" : "for"}</span> ${duration(last - ms(invocation.created_at))}</span>
      <span>${plural(invocation.attempts, "attempt")}</span>
      <span>${plural(invocation.steps, "step")}</span>
      <span class="muted">${bytes(invocation.journal_bytes)} of journal</span>
      ${invocation.deployment && html`<a href=${href(["services"], { deployment: invocation.deployment })} class="mono">${invocation.deployment}</a>`}
      ${by && html`<span><span class="muted">called by</span> <${Id} id=${by.id} /></span>`}
      ${invocation.steps_copied_from && html`<span><span class="muted">restarted from</span> <${Id} id=${invocation.steps_copied_from} /></span>`}
      ${invocation.idempotency_key && html`<span><span class="muted">idempotency key</span> <code>${invocation.idempotency_key}</code></span>`}
    </div>
    <${Why} invocation=${invocation} />
  </header>`;
}

function Journal({ steps, choose }) {
  return html`<div class="card scroll-x"><table class="list"><thead><tr><th>#</th><th>Step</th><th>Kind</th><th>Attempt</th><th>Began</th><th class="right">Took</th><th>Outcome</th></tr></thead><tbody>
    ${steps.slice(0, 2000).map((step) => html`<tr key=${step.index}><td class="faint">${step.index}</td><td><button type="button" class="link" onClick=${() => choose(step.index)}>${nameOf(step)}</button></td>
      <td><span class="tag">${step.op}</span></td><td>${step.attempt ?? ""}</td><td class="nowrap"><${Time} at=${step.began_at} live=${false} /></td><td class="right nowrap">${step.duration_ms === null ? "" : duration(step.duration_ms)}</td>
      <td class="outcome">${step.outcome ? failed(step) ? html`<span class="bad">${step.outcome.failure.message}</span>` : html`<code class="clip">${JSON.stringify(step.outcome.value)?.slice(0, 160)}</code>` : step.completed_as ? html`<span class="muted">done</span>` : html`<span class="muted">not yet</span>`}</td></tr>`)}
  </tbody></table></div>${steps.length > 2000 && html`<p class="muted">The first 2,000 steps are listed; the timeline has all that are loaded.</p>`}`;
}

function Tree({ invocation, steps }) {
  const asked = useGet(`/invocations/${segment(invocation.id)}/tree`, {}, { every: 3000 });
  if (asked.error?.missing) {
    // An older node: one level up and one down, from the record and the journal.
    const children = steps.filter((step) => step.argument.invocation);
    return html`<div class="card"><div class="body tree">
      ${invocation.called_by && html`<p><span class="muted">Called by</span> <${Id} id=${invocation.called_by.id} whole /></p>`}
      <ul><li><strong>${invocation.service}/${invocation.handler}</strong><ul>${children.map((step) => html`<li key=${step.index}><span class="tag">${step.op}</span> ${nameOf(step)} <${Id} id=${step.argument.invocation} /></li>`)}</ul></li></ul>
      ${!children.length && html`<p class="muted">It has called and sent nothing.</p>`}</div></div>`;
  }
  if (asked.error) return html`<${Failure} error=${asked.error} retry=${asked.reload} />`;
  if (!asked.data) return html`<${Loading} />`;
  const below = new Map();
  for (const node of asked.data.nodes) below.set(node.parent, [...(below.get(node.parent) || []), node]);
  const branch = (node, depth) => html`<li key=${node.id}><div class="row wrap"><${Status} of=${statusOf(node)} />
      ${node.id === invocation.id ? html`<strong>${node.service}/${node.handler}</strong>` : html`<a href=${href(["invocations", node.id])}>${node.service}/${node.handler}</a>`}
      ${node.key && html`<code>${node.key}</code>`}<span class="muted">${duration((node.completed_at ? ms(node.completed_at) : Date.now()) - ms(node.created_at))}</span></div>
    ${below.has(node.id) && depth < 60 && html`<ul>${below.get(node.id).map((each) => branch(each, depth + 1))}</ul>`}</li>`;
  const roots = asked.data.nodes.filter((node) => node.id === asked.data.root);
  return html`<div class="card"><div class="body tree"><ul>${roots.map((node) => branch(node, 0))}</ul>${!asked.data.complete && html`<p class="muted">The tree is larger: 1,000 invocations are shown.</p>`}</div></div>`;
}

function State({ invocation }) {
  const asked = useGet(invocation.key ? `/services/${segment(invocation.service)}/${segment(invocation.key)}/state` : null);
  if (!invocation.key) return html`<${Empty} icon="objects" title="No state"><p>${invocation.service} is a service without keys. Virtual objects and workflows have state under each key.</p></${Empty}>`;
  if (asked.error) return html`<${Failure} error=${asked.error} />`;
  if (!asked.data) return html`<${Loading} />`;
  return html`<div class="card"><header><h2>State of ${invocation.key}</h2><a class="button" href=${href(["objects", invocation.service, invocation.key])}>Open the object</a></header><div class="body">
    ${Object.keys(asked.data.state).length ? html`<${Json} value=${asked.data.state} />` : html`<p class="muted">No values.</p>`}</div></div>`;
}

const TABS = [["timeline", "Timeline"], ["journal", "Journal"], ["tree", "Tree of calls"], ["state", "State"], ["record", "Record"]];

export default function One({ path, query }) {
  const id = path[1];
  const asked = useGet(`/invocations/${segment(id)}`, {}, { kinds: ["invocation"], filter: { id } });
  const invocation = asked.data;
  const at = useStore(now);
  const { steps, error, complete } = useJournal(id, invocation && `${invocation.status} ${invocation.steps} ${invocation.waiting_steps} ${invocation.attempts} ${invocation.since}`);
  const tab = query.tab || "timeline";
  const chosen = query.step === undefined ? null : Number(query.step);
  const choose = (step) => setQuery({ step: step === null ? "" : String(step) });
  const list = steps?.filter((step) => step.op !== "input") || [];
  const move = (by) => {
    const place = list.findIndex((step) => step.index === chosen);
    const next = list[Math.min(list.length - 1, Math.max(0, place + by))];
    if (next) choose(next.index);
  };
  useKeys({
    j: ["Next step", () => move(1)],
    k: ["Previous step", () => move(-1)],
    Escape: ["Close the step", () => choose(null)],
    u: ["Back to the list", () => go(["invocations"])],
  });
  const completed = invocation?.status === "completed";
  const last = invocation ? (completed ? ms(invocation.since) : at) : 0;
  const step = steps?.find((each) => each.index === chosen);
  const doubt = useMemo(() => steps && invocation && steps.find((each) => decidable(invocation, each)), [steps, invocation]);
  if (asked.error && !invocation) {
    if (asked.error.status === 404) {
      return html`<div class="page"><${Empty} icon="search" title="There is no such invocation"><p>${id}</p><p>It never existed, was purged, or was forgotten after the retention of its handler.</p><a class="button" href=${href(["invocations"])}>All invocations</a></${Empty}></div>`;
    }
    return html`<div class="page"><${Failure} error=${asked.error} retry=${asked.reload} /></div>`;
  }
  if (!invocation) return html`<div class="page"><${Loading} /></div>`;
  return html`<div class="page one">
    <${Head} invocation=${invocation} last=${last} reload=${asked.reload} />
    ${doubt && html`<${Notice} kind="worse" icon="warning"><strong>Step ${doubt.index}, ${nameOf(doubt)}, is in doubt.</strong> It may or may not have happened. ${" "}<button type="button" class="link" onClick=${() => choose(doubt.index)}>Look and decide</button></${Notice}>`}
    <nav class="tabs" aria-label="Views">${TABS.map(([name, label]) => html`<a key=${name} href=${href(path, { ...query, tab: name === "timeline" ? "" : name })} aria-current=${tab === name ? "page" : undefined}>${label}</a>`)}</nav>
    ${error && html`<${Failure} error=${error} what="The journal" />`}
    ${!complete && html`<${Notice}>The journal is long: the first ${number(STEPS_MAX)} steps are loaded.</${Notice}>`}
    ${!steps ? !error && html`<${Loading} />` : tab === "timeline" ? html`<div class="card"><${Waterfall} invocation=${invocation} steps=${steps} last=${last} chosen=${chosen} choose=${choose} /></div>
      <div class="two-columns"><${Values} title="Input" value=${steps[0]?.op === "input" ? steps[0].outcome : null} /><${Values} title="Outcome" value=${invocation.outcome} pending=${!completed} /></div>`
      : tab === "journal" ? html`<${Journal} steps=${steps} choose=${choose} />`
      : tab === "tree" ? html`<${Tree} invocation=${invocation} steps=${steps} />`
      : tab === "state" ? html`<${State} invocation=${invocation} />`
      : html`<div class="card"><div class="body"><${Json} value=${invocation} /></div></div>`}
    ${step && html`<${Step} invocation=${invocation} step=${step} last=${last} close=${() => choose(null)} reload=${asked.reload} />`}
  </div>`;
}

function Values({ title, value, pending }) {
  return html`<section class="card"><header><h2>${title}</h2></header><div class="body">
    ${!value ? html`<p class="muted">${pending ? "Not completed yet." : "None."}</p>` : value.failure ? html`<p class="bad">${value.failure.message}</p><p class="muted">${[value.failure.code, value.failure.kind].filter(Boolean).join(" ")}</p>` : html`<${Json} value=${value.value ?? null} />`}</div></section>`;
}
