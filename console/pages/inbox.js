// The inbox: what waits for somebody or something, the urgent first, with what is needed to answer it.
import { classes, html, useEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { get, may, segment, useGet } from "../lib/api.js";
import { useStore } from "../lib/store.js";
import { href, setQuery } from "../lib/router.js";
import { atDay, duration, ms, now, shortId, visible } from "../lib/format.js";
import { useKeys } from "../lib/keys.js";
import { Empty, Failure, Id, Json, Loading, Notice, Time, useNarrow } from "../parts/basics.js";
import { Approval } from "../parts/approval.js";
import { Step } from "../parts/step.js";
import { failed, nameOf } from "../parts/waterfall.js";
import { actOnOne } from "../parts/actions.js";
import { Status } from "../parts/status.js";

const LIMIT = 200;
const PEOPLE = "approval,in-doubt,awakeable,promise"; // Timers come by themselves.
const KINDS = { approval: "approval", "in-doubt": "in doubt", awakeable: "awakeable", promise: "promise", paused: "paused", timer: "timer" };
const ORDER = ["approval", "in-doubt", "paused", "promise", "awakeable", "timer"];
const keyOf = (each) => `${each.kind} ${each.invocation} ${each.step ?? ""}`;

/** An older node has no list of what waits: then what is paused is shown, and what is in doubt is told from its failure. */
function useWaiting(kind) {
  const asked = useGet(kind === "paused" ? null : "/waiting", { kind: kind || PEOPLE, limit: LIMIT }, { kinds: ["approvals"], every: 4000 });
  const paused = useGet(!kind || kind === "paused" || asked.error?.missing ? "/invocations" : null, { status: "paused", limit: LIMIT }, { every: 4000 });
  const list = useMemo(() => {
    if (!paused.data && !asked.data) return null;
    const waiting = kind === "paused" ? [] : asked.data?.waiting || [];
    const doubt = new Set(waiting.filter((each) => each.kind === "in-doubt").map((each) => each.invocation));
    const rows = !kind || kind === "paused" || asked.error?.missing ? (paused.data?.invocations || []).filter((each) => !doubt.has(each.id)) : [];
    const more = rows.map((each) => ({ kind: "paused", invocation: each.id, service: each.service, handler: each.handler, key: each.key, since: each.since, name: each.failure?.message || "" }));
    return [...waiting, ...more].sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind) || (ms(a.due_at) || Infinity) - (ms(b.due_at) || Infinity) || ms(a.since) - ms(b.since));
  }, [asked.data, paused.data, kind]);
  const reload = () => {
    asked.reload();
    paused.reload();
  };
  return { list, error: asked.error?.missing ? paused.error : asked.error, older: asked.error?.missing, cut: Boolean(asked.data?.cursor || paused.data?.cursor), reload };
}

function Answer({ each }) {
  const { data, error, reload } = useGet(`/invocations/${segment(each.invocation)}`, {}, { kinds: ["invocation"], filter: { id: each.invocation } });
  const journal = useGet(`/invocations/${segment(each.invocation)}/journal`, {}, {});
  const [open, setOpen] = useState(null);
  const at = useStore(now);
  useEffect(() => setOpen(null), [each]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!data || !journal.data) return html`<${Loading} />`;
  const steps = journal.data.steps;
  const step = steps.find((one) => (each.step != null ? one.index === each.step : data.last_failure?.kind === "InDoubt" && one.op === "run" && !one.outcome && !one.completed_as));
  const shown = open ?? (data.last_failure?.kind === "InDoubt" ? step : null);
  const recent = steps.filter((one) => one.op !== "input").slice(-6).reverse();
  return html`<article class="stack answer"><div class="row wrap"><span class=${`tag ${each.kind === "in-doubt" || data.last_failure?.kind === "InDoubt" ? "worst" : "worse"}`}>${data.last_failure?.kind === "InDoubt" ? "in doubt" : KINDS[each.kind]}</span><span class="muted">since <${Time} at=${each.since} /></span>${each.due_at && html`<span class="muted">until ${atDay(each.due_at)}</span>`}</div>
    <h2 class="answer-title"><a href=${href(["invocations", each.invocation])}>${each.service}/${each.handler}</a>${each.key && html` <code>${each.key}</code>`}</h2>
    <${Id} id=${each.invocation} whole />
    ${data.why_not_running && html`<${Notice} kind=${data.status === "paused" ? "worst" : ""} icon=${data.status === "paused" ? "warning" : "info"}>${data.why_not_running}</${Notice}>`}
    ${step && data.last_failure?.kind === "InDoubt" && html`<div><button type="button" class="primary" id="decide" onClick=${() => setOpen(step)}>Decide step ${step.index}, ${nameOf(step)}</button></div>`}
    ${data.status === "paused" && data.last_failure?.kind !== "InDoubt" && may("operate") && html`<div class="row"><button type="button" class="primary" onClick=${async () => (await actOnOne("resume", data)) && reload()}>Resume</button><button type="button" onClick=${async () => (await actOnOne("cancel", data)) && reload()}>Cancel</button></div>`}
    ${each.kind === "awakeable" || each.kind === "promise" ? html`<p class="muted">The ingress completes it, with a token that has the role invoke:</p><div class="code mono"><span>${each.kind === "awakeable" ? `curl -X POST NODE:8080/holdfast/awakeables/${step?.argument.id || "AWAKEABLE"}/resolve --json '{"approved": true}'` : `curl NODE:8080/holdfast/workflow/${each.service}/${each.key}/promises/${each.name}/resolve --json 'true'`}</span></div>` : null}
    <section class="stack"><h3>Input</h3><${Json} value=${steps[0]?.outcome?.value ?? null} /></section>
    <section class="stack"><h3>Last steps</h3><ul class="recent">${recent.map((one) => html`<li><button type="button" class="link" onClick=${() => setOpen(one)}>${one.index} ${nameOf(one)}</button><span class=${failed(one) ? "bad clip" : "muted clip"}>${failed(one) ? one.outcome.failure.message : one.outcome ? JSON.stringify(one.outcome.value) : one.completed_as ? "done" : "not completed"}</span></li>`)}</ul></section>
    ${open && html`<${Step} invocation=${data} step=${open} last=${at} close=${() => setOpen(null)} reload=${reload} />`}</article>`;
}

export default function Inbox({ query }) {
  const { list: waiting, error, older, cut, reload } = useWaiting(query.kind);
  const decided = useRef(new Set()); // Here: the next list may still have them.
  const list = useMemo(() => waiting?.filter((each) => !decided.current.has(keyOf(each))), [waiting, query.of, decided.current.size]);
  const narrow = useNarrow("(max-width: 860px)");
  const at = useStore(now);
  // What is read stays, whatever comes or goes in the meantime: a button must not become that of another approval.
  const last = useRef(null);
  const held = last.current && (query.of ? keyOf(last.current) === query.of : !narrow) && (!query.kind || query.kind === last.current.kind) ? last.current : null;
  const current = held && list?.find((each) => keyOf(each) === keyOf(held));
  const chosen = list?.find((each) => keyOf(each) === query.of) || current || (held?.kind === "approval" ? held : null) || (narrow ? null : list?.[0]);
  last.current = chosen || null;
  const done = () => {
    decided.current.add(keyOf(chosen));
    last.current = null;
    setQuery({ of: "" });
    reload();
  };
  const move = (by) => {
    const place = list?.indexOf(chosen) ?? -1;
    const next = list?.[Math.min(list.length - 1, Math.max(0, place + by))];
    if (next) setQuery({ of: keyOf(next) });
  };
  useKeys({ j: ["Next", () => move(1)], k: ["Previous", () => move(-1)], Enter: ["Open the invocation", () => chosen && (location.hash = href(["invocations", chosen.invocation]))] });
  return html`<div class="page fills inbox"><div class="page-head"><h1>Inbox</h1></div>
    <div class="facets" role="group" aria-label="Kind">${[["", "Everything"], ["approval", "Approvals"], ["in-doubt", "In doubt"], ["paused", "Paused"], ["awakeable", "Awakeables"], ["promise", "Promises"], ["timer", "Timers"]].filter(([kind]) => !older || !kind || kind === "paused").map(([kind, label]) => html`<button type="button" class="facet" aria-pressed=${(query.kind || "") === kind ? "true" : "false"} onClick=${() => setQuery({ kind, of: "" })}>${label}</button>`)}</div>
    ${older && html`<${Notice}>This node does not list approvals, awakeables, promises and timers yet; what is paused or in doubt is shown.</${Notice}>`}
    ${error && html`<${Failure} error=${error} retry=${reload} />`}
    ${!list && !error && html`<${Loading} />`}
    ${list && !list.length && !chosen && html`<${Empty} icon="inbox" title="Nothing waits for you"><p>Approvals, steps in doubt, paused invocations, and invocations that wait for an answer appear here.</p></${Empty}>`}
    ${(list?.length > 0 || (list && chosen)) && html`<div class=${classes("panes", narrow && chosen && "second")}>
      <ul class="card waiting" aria-label="Waiting">${list.map((each) => html`<li key=${keyOf(each)}><button type="button" aria-current=${each === chosen ? "true" : undefined} onClick=${() => setQuery({ of: keyOf(each) })}>
        <span class="row"><span class=${`tag ${each.kind === "in-doubt" ? "worst" : each.kind === "paused" || each.kind === "approval" ? "worse" : ""}`}>${KINDS[each.kind]}</span><span class="grow clip">${each.service}/${each.handler}</span><span class="muted nowrap">${duration(at - ms(each.since)).split(" ").slice(0, 2).join(" ")}</span></span>
        <span class="muted clip block">${visible(each.name || each.key || shortId(each.invocation))}${each.due_at ? `, until ${atDay(each.due_at)}` : ""}</span></button></li>`)}
        ${cut && html`<li class="muted foot">More wait: the first ${LIMIT} are listed.</li>`}</ul>
      <div class="card pane">${narrow && chosen && html`<button type="button" class="link" onClick=${() => setQuery({ of: "" })}>Back to the list</button>`}${chosen && (chosen.kind === "approval" ? html`<${Approval} key=${keyOf(chosen)} id=${chosen.approval} done=${done} />` : html`<${Answer} key=${keyOf(chosen)} each=${chosen} />`)}</div></div>`}
  </div>`;
}
