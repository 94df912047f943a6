// One approval: what is asked, and the decision with a comment and, if it may be edited, another payload.
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { may, post, segment, session, useGet } from "../lib/api.js";
import { href } from "../lib/router.js";
import { atDay, visible } from "../lib/format.js";
import { useKeys } from "../lib/keys.js";
import { Failure, Id, Json, Loading, Notice, Time } from "./basics.js";
import { attempt, confirm } from "./dialog.js";
import { parse } from "../lib/json.js";

const ENDS = {
  "timed-out": "Nobody decided before its deadline.",
  withdrawn: "It was withdrawn: the code went on without it.",
  cancelled: "Its invocation was cancelled before anybody decided.",
  gone: "Its invocation ended before anybody decided.",
};

/** A token for some services decides for these alone, unless it belongs to an operator. */
function mayDecide(service) {
  const services = session.get()?.services || [];
  return may("approve") && (!services.length || services.includes(service) || may("operate"));
}

function Decision({ approval }) {
  const { decision, status } = approval;
  if (status !== "decided") return html`<${Notice} kind="worse" icon="info">${ENDS[status] || status}</${Notice}>`;
  return html`<${Notice} kind="good" icon="check"><strong>${visible(decision.choice)}</strong>, decided by ${decision.by.name} <${Time} at=${decision.at} />
    ${decision.comment && html`<div>${visible(decision.comment)}</div>`}</${Notice}>
    ${decision.payload !== undefined && html`<section class="stack"><h3>Approved instead</h3><${Json} value=${decision.payload} /></section>`}`;
}

function Decide({ approval, done, reload }) {
  const [comment, setComment] = useState("");
  const [text, setText] = useState(null); // The edited payload; null: as it was asked.
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const note = useRef(null);
  const editor = useRef(null);
  useEffect(() => text !== null && editor.current?.focus(), [text !== null]);
  const decide = async (choice) => {
    const body = { choice };
    if (comment.trim()) body.comment = comment.trim();
    setProblem("");
    if (text !== null) {
      try {
        body.payload = parse(text);
      } catch (error) {
        setProblem(`The payload must be JSON: ${error.message}`);
        return;
      }
    }
    setBusy(true);
    const answer = await attempt(() => post(`/approvals/${segment(approval.id)}`, {}, body), (made) => `${made.status === "Decided" ? "Decided" : "Decided before"}: ${made.decision.choice}`);
    setBusy(false);
    if (answer) done();
    else reload(); // Somebody else may have been faster.
  };
  const byKey = async (choice) => {
    if (await confirm({ title: visible(`${choice}: ${approval.title}`), text: "The decision is final.", word: visible(choice), danger: false })) decide(choice);
  };
  const keys = Object.fromEntries(approval.choices.slice(0, 9).map((choice, at) => [String(at + 1), [`Decide “${choice}”`, () => byKey(choice)]]));
  const edit = () => setText(text === null ? JSON.stringify(approval.payload, null, 2) : null);
  useKeys({ ...keys, c: ["Comment", () => note.current?.focus()], ...(approval.editable ? { e: ["Edit the payload", edit] } : {}) });
  return html`<form class="stack" id="approval-form" onSubmit=${(event) => event.preventDefault()}>
    ${approval.editable && html`<div><button type="button" class="small" id="edit-payload" aria-expanded=${text !== null ? "true" : "false"} onClick=${edit}>${text === null ? "Edit the payload" : "Keep the payload as it was asked"}</button></div>`}
    ${text !== null && html`<label class="field">Payload as JSON
      <textarea id="approval-payload" ref=${editor} class="mono" rows="8" spellcheck=${false} value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>`}
    <label class="field">Comment
      <textarea id="approval-comment" ref=${note} rows="2" maxlength="2000" placeholder="Why; it stays in the journal" value=${comment} onInput=${(event) => setComment(event.target.value)}></textarea></label>
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
    <div class="row wrap">${approval.choices.map((choice, at) => html`<button type="button" key=${choice} data-choice=${choice} class=${choice === "approve" || (at === 0 && !approval.choices.includes("approve")) ? "primary" : choice === "reject" ? "danger" : ""} disabled=${busy} title=${at < 9 ? `Key ${at + 1}` : ""} onClick=${() => decide(choice)}>${visible(choice[0].toUpperCase() + choice.slice(1))}</button>`)}</div></form>`;
}

/** `done`: called after a decision of this user. */
export function Approval({ id, done }) {
  const { data, error, reload } = useGet(`/approvals/${segment(id)}`, {}, { kinds: ["approvals"], every: 10_000 });
  if (error && !data) return html`<${Failure} error=${error} what="This approval" retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const waits = data.status === "waiting";
  return html`<article class="stack answer"><div class="row wrap"><span class=${`tag ${waits ? "worse" : ""}`}>${waits ? "approval" : data.status}</span>
      ${data.assignee && html`<span>for <strong>${visible(data.assignee)}</strong></span>`}<span class="muted">since <${Time} at=${data.since} /></span>
      ${data.due_at && html`<span class="muted">until ${atDay(data.due_at)}</span>`}${data.reminded_at && html`<span class="muted">reminded <${Time} at=${data.reminded_at} /></span>`}</div>
    <h2 class="answer-title">${visible(data.title)}</h2>
    <p class="muted">Asked by <a href=${href(["invocations", data.invocation])}>${data.service}/${data.handler}</a>${data.key && html` <code>${visible(data.key)}</code>`}</p><${Id} id=${data.invocation} whole />
    <section class="stack"><h3>Payload</h3><${Json} value=${data.payload} /></section>
    ${!waits ? html`<${Decision} approval=${data} />` : mayDecide(data.service) ? html`<${Decide} key=${data.id} approval=${data} done=${done} reload=${reload} />`
      : html`<p class="muted">Somebody with the role approve${may("approve") ? " for this service" : ""} decides.</p>`}</article>`;
}
