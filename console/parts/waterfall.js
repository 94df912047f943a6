// Attempts, steps and waits of one invocation on a time axis. Long gaps of pure waiting are folded; a drag zooms in.
import { classes, html, useMemo, useRef, useState } from "../lib/ui.js";
import { duration, ms } from "../lib/format.js";
import { Virtual, useNarrow } from "./basics.js";
import { Icon } from "./icons.js";

const FOLD_SHARE = 0.18; // A gap that takes more of the axis than this is folded,
const FOLDED = 0.05; // to this part of it.
const FOLDS_MAX = 4;
const WAITS = new Set(["sleep", "awakeable", "approval", "promise", "attach", "call"]);
const STATE = new Set(["get", "set", "clear", "clear_all", "keys", "peek", "value"]);
const LABELS = { call: "call", send: "send", sleep: "sleep", awakeable: "awakeable", approval: "approval", promise: "promise", run: "run", attach: "attach", resolve: "resolve" };
const ROW_PX = 30;

export const kindOf = (step) => (STATE.has(step.op) ? "state" : step.op === "run" ? "run" : step.op === "call" || step.op === "send" ? "call" : WAITS.has(step.op) ? "wait" : "other");

export function nameOf(step) {
  const { argument } = step;
  if (step.op === "input") return "input";
  if (step.op === "call" || step.op === "send") return `${argument.service}/${argument.handler}${argument.key ? ` ${argument.key}` : ""}`;
  if (STATE.has(step.op)) return [step.op, argument.name].filter(Boolean).join(" ");
  return argument.name || argument.title || step.key || step.op;
}

export const failed = (step) => Boolean(step.outcome && "failure" in step.outcome);

const endOf = (step, last) => (step.outcome || step.completed_as ? Math.max(ms(step.journaled_at), ms(step.began_at)) : last);

/** Attempts with their times: those that ended badly are recorded; the rest is told by the steps. */
export function attemptsOf(invocation, steps, last) {
  const found = invocation.attempt_history.map((each) => ({
    number: each.attempt, from: ms(each.started_at), to: ms(each.ended_at), how: each.how, error: each.error, node: each.node,
  }));
  const known = new Set(found.map((each) => each.number));
  const running = ["running"].includes(invocation.status);
  const spans = new Map();
  for (const step of steps) {
    if (!step.attempt || known.has(step.attempt)) continue;
    const span = spans.get(step.attempt) || [Infinity, -Infinity];
    const to = step.op === "run" ? endOf(step, running ? last : ms(step.journaled_at)) : ms(step.began_at || step.journaled_at);
    spans.set(step.attempt, [Math.min(span[0], ms(step.began_at || step.journaled_at)), Math.max(span[1], to)]);
  }
  for (const [number, [from, to]] of spans) found.push({ number, from, to, how: "" });
  const newest = found.find((each) => each.number === invocation.attempts);
  if (newest && !known.has(newest.number)) {
    if (running) newest.to = last;
    else if (invocation.status === "completed") newest.to = Math.max(newest.to, ms(invocation.since));
  }
  return found.filter((each) => Number.isFinite(each.from)).sort((a, b) => a.number - b.number);
}

/** Time to a share of the axis (0 to 1). */
export function scaleOf(from, to, busy) {
  const edges = [...new Set([from, to, ...busy.flat()])].filter((each) => each >= from && each <= to).sort((a, b) => a - b);
  const gaps = [];
  for (let at = 1; at < edges.length; at += 1) {
    const [a, b] = [edges[at - 1], edges[at]];
    if (b - a > 1000 && !busy.some(([start, end]) => start < b && end > a)) gaps.push({ from: a, to: b });
  }
  gaps.sort((a, b) => b.to - b.from - (a.to - a.from));
  const folds = [];
  let left = to - from;
  for (const gap of gaps.slice(0, FOLDS_MAX)) {
    if (gap.to - gap.from < left * FOLD_SHARE || left - (gap.to - gap.from) < 1) break;
    folds.push(gap);
    left -= gap.to - gap.from;
  }
  folds.sort((a, b) => a.from - b.from);
  const share = 1 - folds.length * FOLDED;
  const at = (time) => {
    let x = 0;
    let before = from;
    for (const fold of folds) {
      if (time <= fold.from) break;
      x += ((fold.from - before) / left) * share;
      x += (Math.min(1, (time - fold.from) / (fold.to - fold.from)) * FOLDED);
      before = Math.min(time, fold.to);
    }
    return x + (Math.max(0, time - before) / Math.max(1, left)) * share;
  };
  const back = (x) => {
    let [low, high] = [from, to];
    for (let round = 0; round < 40; round += 1) {
      const middle = (low + high) / 2;
      if (at(middle) < x) low = middle;
      else high = middle;
    }
    return low;
  };
  return { at, back, folds, from, to };
}

const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000, 1_800_000, 3_600_000, 7_200_000, 21_600_000, 86_400_000, 604_800_000];

function ticksOf(scale, start, many) {
  const span = (scale.to - scale.from) - scale.folds.reduce((sum, each) => sum + each.to - each.from, 0);
  const size = STEPS.find((each) => span / each <= many) || STEPS[STEPS.length - 1];
  const ticks = [];
  for (let at = Math.ceil((scale.from - start) / size) * size; start + at <= scale.to && ticks.length < 60; at += size) {
    const fold = scale.folds.find((each) => start + at > each.from && start + at < each.to);
    if (fold) {
      at = Math.floor((fold.to - start) / size) * size;
      continue;
    }
    const x = scale.at(start + at);
    if (!ticks.length || x - ticks[ticks.length - 1].x > 0.6 / many) ticks.push({ x, text: at === 0 ? "0" : tick(at) });
  }
  return ticks;
}

const tick = (value) => (value < 1000 ? `${value} ms` : value < 60_000 ? `${value / 1000} s` : duration(value));
const percent = (share) => `${(share * 100).toFixed(3)}%`;

export function Waterfall({ invocation, steps, last, chosen, choose, row }) {
  const [zoom, setZoom] = useState(null);
  const [drag, setDrag] = useState(null);
  const [withState, setWithState] = useState(false);
  const narrow = useNarrow();
  const axis = useRef(null);
  const start = ms(invocation.created_at);
  const attempts = useMemo(() => attemptsOf(invocation, steps, last), [invocation, steps, last]);
  const hidden = steps.filter((step) => kindOf(step) === "state").length;
  const shown = useMemo(() => steps.filter((step) => step.op !== "input" && (withState || kindOf(step) !== "state")), [steps, withState]);
  const scale = useMemo(() => {
    const end = Math.max(last, start + 1, ...attempts.map((each) => each.to));
    if (zoom) return scaleOf(zoom[0], zoom[1], [[zoom[0], zoom[1]]]);
    const busy = [...attempts.map((each) => [each.from, each.to]), ...steps.filter((step) => step.op === "run" && step.began_at).map((step) => [ms(step.began_at), step.outcome ? endOf(step, end) : ms(step.began_at)])];
    return scaleOf(start, end, invocation.status === "running" ? busy : busy.map(([a, b]) => [a, Math.min(b, end)]));
  }, [steps, attempts, last, zoom]);
  const ticks = ticksOf(scale, start, narrow ? 3 : 8);
  const share = (event) => {
    const box = axis.current.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const zoomed = (event) => {
    if (!drag) return;
    const [a, b] = [drag[0], share(event)].sort((x, y) => x - y);
    setDrag(null);
    if (b - a > 0.01) setZoom([scale.back(a), scale.back(b)]);
  };
  const grid = html`<div class="wf-grid" aria-hidden="true">
    ${scale.folds.map((fold) => html`<i class="fold" style=${{ left: percent(scale.at(fold.from)), width: percent(scale.at(fold.to) - scale.at(fold.from)) }}></i>`)}
    ${ticks.map((each) => html`<i class="tick" style=${{ left: percent(each.x) }}></i>`)}
    ${drag && html`<i class="drag" style=${{ left: percent(Math.min(...drag)), width: percent(Math.abs(drag[1] - drag[0])) }}></i>`}</div>`;
  const bar = (from, to, cls, title, text) => {
    const [a, b] = [Math.max(0, scale.at(from)), Math.min(1, scale.at(to))];
    if (b < 0 || a > 1 || to < scale.from || from > scale.to) return null;
    return html`<span class=${`wf-bar ${cls}`} title=${title} style=${{ left: percent(a), width: `max(3px, ${percent(b - a)})` }}></span>
      ${text && html`<span class=${classes("wf-took", b > 0.85 && a < 0.15 && "inside")} style=${b <= 0.85 ? { left: `calc(max(${percent(a)} + 3px, ${percent(b)}) + 6px)` } : a < 0.15 ? { right: `calc(${percent(1 - b)} + 8px)` } : { right: `calc(${percent(1 - a)} + 6px)` }}>${text}</span>`}`;
  };
  const line = (step, index, place) => {
    const begin = ms(step.began_at || step.journaled_at);
    const end = endOf(step, step.op === "run" && invocation.status !== "running" ? attempts.find((each) => each.number === step.attempt)?.to || begin : last);
    const open = !step.outcome && !step.completed_as;
    const kind = kindOf(step);
    const cls = classes(kind, failed(step) && "failed", open && "open", step.abandoned && "abandoned");
    const took = open ? (end > begin && end === last ? `${duration(end - begin)} so far` : "not completed") : end > begin ? duration(end - begin) : "";
    return html`<button type="button" class=${classes("line", "wf-row", step.index === chosen && "chosen", index === row && "current")} style=${place} key=${step.index} onClick=${() => choose(step.index)}>
      <span class="wf-name"><span class="hidden-text">Step </span><span class="faint">${step.index}</span><span class=${`wf-mark ${cls}`} aria-hidden="true"></span><span class="clip">${nameOf(step)}</span><span class="hidden-text">${failed(step) ? " failed " : open ? " " : " completed "}</span>${kind !== "run" && kind !== "state" ? html`<span class="tag">${step.op}</span>` : null}</span>
      <span class="wf-track">${end < start ? html`<span class="wf-took" style=${{ left: "6px" }}>kept from the original</span>` : bar(begin, end, cls, `${nameOf(step)}: ${took || "at once"}`, took)}</span></button>`;
  };
  return html`<div class="waterfall">
    <div class="row wrap wf-tools"><span class="wf-key"><i class="wf-mark run"></i>run</span><span class="wf-key"><i class="wf-mark call"></i>call</span><span class="wf-key"><i class="wf-mark wait"></i>wait</span><span class="wf-key"><i class="wf-mark run failed"></i>failed</span>
      ${hidden > 0 && html`<label class="check"><input type="checkbox" checked=${withState} onChange=${() => setWithState(!withState)} />${hidden} steps of state</label>`}
      <span class="grow"></span>
      ${zoom ? html`<button type="button" class="small" onClick=${() => setZoom(null)}><${Icon} name="restart" size=${13} />Whole time</button>` : html`<span class="muted">Drag on the axis to zoom</span>`}</div>
    <div class="wf-head"><span class="wf-name muted">Attempts</span>
      <div class="wf-axis" ref=${axis} onPointerDown=${(event) => {
        event.currentTarget.setPointerCapture(event.pointerId);
        setDrag([share(event), share(event)]);
      }} onPointerMove=${(event) => drag && setDrag([drag[0], share(event)])} onPointerUp=${zoomed} onPointerCancel=${() => setDrag(null)}>
        ${ticks.map((each) => html`<span class="wf-tick" style=${each.x > 0.94 ? { right: 0 } : { left: percent(each.x) }}>${each.text}</span>`)}
        ${scale.folds.map((fold) => html`<span class="wf-fold" title=${`${duration(fold.to - fold.from)} of waiting are folded`} style=${{ left: percent(scale.at(fold.from)), width: percent(scale.at(fold.to) - scale.at(fold.from)) }}>${duration(fold.to - fold.from).split(" ").slice(0, 2).join(" ")}</span>`)}
        <span class="wf-attempts">${attempts.map((each) => bar(each.from, each.to, classes("attempt", each.how && each.how !== "succeeded" && each.how !== "suspended" && "failed"),
          `Attempt ${each.number}${each.how ? `: ${each.how}` : ""}${each.node ? ` on ${each.node}` : ""}${each.error ? `: ${each.error.message}` : ""}`))}</span>
      </div></div>
    <div class="wf-body" style=${{ height: `${Math.min(shown.length, 24) * ROW_PX + 2}px` }}>${grid}
      <${PlainVirtual} rows=${shown} line=${line} row=${row} /></div>
    ${!shown.length && html`<p class="muted wf-none">${invocation.status === "queued" || invocation.status === "scheduled" ? "It has not started." : "No steps are journaled."}</p>`}
  </div>`;
}

function PlainVirtual({ rows, line, row }) {
  return html`<${Virtual} rows=${rows} height=${ROW_PX} line=${line} label="Steps" atRow=${row} plain />`;
}
