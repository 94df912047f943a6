// A status has a colour, a shape and a word, never a colour alone.
import { html } from "../lib/ui.js";

const LINE = { fill: "none", stroke: "currentColor", "stroke-width": "1.5", "stroke-linecap": "round", "stroke-linejoin": "round" };
const SHAPES = {
  running: () => html`<circle cx="6" cy="6" r="4" fill="currentColor" />`,
  suspended: () => html`<circle cx="6" cy="6" r="3.75" ...${LINE} />`,
  queued: () => html`<path d="M2 3h8M2 6h8M2 9h8" ...${LINE} />`,
  scheduled: () => html`<circle cx="6" cy="6" r="4.75" ...${LINE} /><path d="M6 3.500V6l1.750 1.250" ...${LINE} />`,
  "backing-off": () => html`<path d="M10 6a4 4 0 1 1-1.500-3.100M10 1.500v2.250H7.750" ...${LINE} />`,
  paused: () => html`<path d="M4 2.500v7M8 2.500v7" ...${LINE} stroke-width="2" />`,
  succeeded: () => html`<path d="M2 6.500L4.750 9.250 10 3" ...${LINE} stroke-width="1.750" />`,
  failed: () => html`<path d="M2.750 2.750l6.500 6.500M9.250 2.750l-6.500 6.500" ...${LINE} stroke-width="1.750" />`,
  cancelled: () => html`<path d="M2.500 9.500l7-7" ...${LINE} stroke-width="1.750" />`,
};
SHAPES.killed = SHAPES.cancelled;
SHAPES.completed = SHAPES.succeeded;

export const ACTIVE = ["running", "suspended", "queued", "scheduled", "backing-off", "paused"];
export const ENDS = ["succeeded", "failed", "cancelled", "killed"];
export const WORDS = { "backing-off": "backing off" };
export const word = (status) => WORDS[status] || status;

/** What is shown of an invocation: its status, or how it ended. */
export const statusOf = (invocation) => (invocation.status === "completed" ? invocation.end || "completed" : invocation.status);

export function Status({ of, quiet }) {
  const shape = SHAPES[of];
  return html`<span class=${`status s-${of}`}>
    <svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">${shape && shape()}</svg>
    <span class=${quiet ? "hidden-text" : ""}>${word(of)}</span>
  </span>`;
}
