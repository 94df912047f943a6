// The drawer of one step: what went in, what came out, when, and what may be done from here.
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { get, may, post, segment } from "../lib/api.js";
import { go } from "../lib/router.js";
import { bytes, duration, exact, ms } from "../lib/format.js";
import { parse } from "../lib/json.js";
import { Code, Copy, Id, Json } from "./basics.js";
import { attempt, confirm } from "./dialog.js";
import { failed, nameOf } from "./waterfall.js";
import { Icon } from "./icons.js";

/** An at-most-once step whose effect nobody knows: somebody has to decide. */
export const decidable = (invocation, step) => invocation.status === "paused" && invocation.last_failure?.kind === "InDoubt" && step.op === "run" && !step.outcome && !step.completed_as && invocation.last_failure.message.includes(`'${nameOf(step)}'`);

const isCut = (value) => value && typeof value === "object" && "bytes" in value && Object.keys(value).every((name) => ["bytes", "begins", "sha256"].includes(name));

function Value({ id, step, part, value }) {
  const [whole, setWhole] = useState();
  if (whole !== undefined) return html`<${Json} value=${whole} />`;
  if (!isCut(value)) return html`<${Json} value=${value ?? null} />`;
  return html`${value.begins !== undefined && html`<div class="json"><span class="text">${typeof value.begins === "string" ? value.begins : JSON.stringify(value.begins)}…</span></div>`}
    <p class="muted">${bytes(value.bytes)} in all.
      <button type="button" class="link" onClick=${() => attempt(async () => setWhole(await get(`/invocations/${segment(id)}/steps/${step}/value`, { part })))}>Load it</button></p>`;
}

function Decide({ invocation, step, done }) {
  const [how, setHow] = useState("value");
  const [text, setText] = useState("null");
  const [problem, setProblem] = useState("");
  if (!may("approve")) return html`<p class="muted">Somebody with the role approve decides.</p>`;
  const submit = async (event) => {
    event.preventDefault();
    setProblem("");
    let body = { again: true };
    if (how === "failure") body = { failure: { message: text } };
    if (how === "value") {
      try {
        body = { value: parse(text) };
      } catch (error) {
        setProblem(`The result must be JSON: ${error.message}`);
        return;
      }
    }
    if (await attempt(() => post(`/invocations/${segment(invocation.id)}/steps/${step.index}/decide`, {}, body), "Decided")) done();
  };
  const choice = (name, label) => html`<label class="check"><input type="radio" name="how" checked=${how === name} onChange=${() => {
    setHow(name);
    setText(name === "value" ? "null" : "");
  }} />${label}</label>`;
  return html`<form class="stack decide" onSubmit=${submit}>
    <p>The process ended while the step ran, so its effect may or may not have happened. Look at the system it touches, then decide:</p>
    ${choice("value", "It happened, with this result")}${choice("failure", "It failed, with this message")}${choice("again", "It did not happen: run it again")}
    ${how !== "again" && html`<textarea rows="3" class=${how === "value" ? "mono" : ""} aria-label=${how === "value" ? "Result as JSON" : "Message"} value=${text} onInput=${(event) => setText(event.target.value)} required></textarea>`}
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
    <div><button type="submit" class="primary">Decide</button></div></form>`;
}

export function Step({ invocation, step, last, close, reload }) {
  const { argument, outcome } = step;
  const box = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    return () => before?.isConnected && before.focus();
  }, []);
  useEffect(() => box.current?.focus(), [step.index]);
  const open = !outcome && !step.completed_as;
  const rest = Object.fromEntries(Object.entries(argument).filter(([name, value]) => !["name", "invocation"].includes(name) && value !== null));
  const restart = async () => {
    if (!(await confirm({ title: `Restart from step ${step.index}?`, text: `A new invocation keeps the ${step.index === 1 ? "input" : `steps before ${step.index}`}, and runs everything from “${nameOf(step)}” on again.`, word: "restart" }))) return;
    const answer = await attempt(() => post(`/invocations/${segment(invocation.id)}/restart`, { step: step.index }), "Restarted");
    if (answer?.new_id) go(["invocations", answer.new_id]);
  };
  return html`<aside class="drawer" aria-label=${`Step ${step.index}`} tabindex="-1" ref=${box}>
    <header><h2 class="clip"><span class="faint">${step.index}</span> ${nameOf(step)} <span class="tag">${step.op}</span></h2>
      <button type="button" class="bare" aria-label="Close" onClick=${close}><${Icon} name="cross" /></button></header>
    <div class="body">
      ${decidable(invocation, step) && html`<section><h3>In doubt</h3><${Decide} invocation=${invocation} step=${step} done=${reload} /></section>`}
      <section><h3>${failed(step) ? "Failure" : "Outcome"}</h3>
        ${open ? html`<p class="muted">${step.abandoned ? "Abandoned." : "Not completed yet."}</p>` : failed(step)
          ? html`<p class="bad">${outcome.failure.message}</p><p class="muted">${[outcome.failure.code, outcome.failure.kind].filter(Boolean).join(" ")}</p>
            ${outcome.failure.trace && html`<ol class="mono trace">${outcome.failure.trace.map((line) => html`<li>${line}</li>`)}</ol>`}`
          : html`<${Value} id=${invocation.id} step=${step.index} part="output" value=${outcome?.value} />`}</section>
      ${argument.invocation && html`<section><h3>Invocation</h3><${Id} id=${argument.invocation} whole /></section>`}
      ${Object.keys(rest).length > 0 && html`<section><h3>Argument</h3><${Json} value=${rest} /></section>`}
      <section><h3>Times</h3><dl class="facts">
        <dt>Began</dt><dd>${exact(step.began_at) || "–"}</dd>
        <dt>${open ? "So far" : "Took"}</dt><dd>${open ? duration(last - ms(step.began_at)) : step.duration_ms !== null ? duration(step.duration_ms) : "at once"}</dd>
        <dt>Journaled</dt><dd>${exact(step.journaled_at)}</dd>
        ${step.attempt && html`<dt>Attempt</dt><dd>${step.attempt}</dd>`}
        <dt>Key</dt><dd class="mono">${step.key || "–"}</dd>
        <dt>Order</dt><dd>${step.completed_as && step.completed_as !== step.journaled_as ? `event ${step.journaled_as}, completed as event ${step.completed_as}` : `event ${step.journaled_as}`}</dd></dl></section>
      ${may("operate") && step.op !== "input" && html`<section><h3>Restart</h3><p class="muted">A new invocation keeps the steps before this one.</p><div><button type="button" id="restart-here" onClick=${restart}><${Icon} name="restart" size=${14} />Restart from here</button></div></section>`}
    </div></aside>`;
}

