// What an operator may do with invocations, said in numbers before it is done.
import { html } from "../lib/ui.js";
import { ask, may, post, segment } from "../lib/api.js";
import { number, plural } from "../lib/format.js";
import { attempt, confirm, toast } from "./dialog.js";

const AT_A_TIME = 8;
const BULK_MAX = 100_000;
const BULK_PATIENCE_MS = 600_000;

/** name: [label, what it does to one, what it does to many, dangerous, statuses in which it makes sense] */
export const ACTIONS = {
  cancel: ["Cancel", "It is asked to stop; its handler may compensate first.", "They are asked to stop; their handlers may compensate first.", true, "active"],
  resume: ["Retry now", "It continues at once.", "They continue at once.", false, ["backing-off", "paused"]],
  pause: ["Pause", "It starts no more attempts until somebody resumes it.", "They start no more attempts until somebody resumes them.", false, ["running", "suspended", "backing-off", "queued", "scheduled"]],
  restart: ["Restart", "A new invocation with the same input starts from the beginning.", "A new invocation starts for each, with the same input.", true, "completed"],
  kill: ["Kill", "It ends at once; no compensation runs.", "They end at once; no compensation runs.", true, "active"],
  purge: ["Purge", "Its record and its journal are deleted.", "Their records and journals are deleted.", true, "completed"],
};

export function fits(action, status) {
  const where = ACTIONS[action][4];
  if (where === "completed") return status === "completed";
  if (where === "active") return status !== "completed";
  return where.includes(status);
}

export async function actOnOne(action, invocation, query = {}) {
  const [label, what, , danger] = ACTIONS[action];
  const name = `${invocation.service}/${invocation.handler}${invocation.key ? ` of ${invocation.key}` : ""}`;
  if (danger && !(await confirm({ title: `${label} ${name}?`, text: what, word: action }))) return undefined;
  return attempt(
    () => post(`/invocations/${segment(invocation.id)}/${action}`, query),
    (answer) => answer.message || `${label}: ${answer.status === "Unchanged" ? "nothing to change" : "done"}`,
  );
}

function counted(action, matched, known) {
  const [label, , what] = ACTIONS[action];
  return { title: `${label} ${known ? plural(matched, "invocation") : "all invocations that match"}?`, text: what, word: action, matched };
}

export async function actOnSome(action, ids) {
  if (!(await confirm({ ...counted(action, ids.length, true), danger: ACTIONS[action][3] || ids.length > 10 }))) return false;
  const tally = { done: 0, unchanged: 0, failed: 0 };
  let reason = "";
  const rest = [...ids];
  const work = async () => {
    while (rest.length) {
      try {
        const answer = await post(`/invocations/${segment(rest.pop())}/${action}`);
        tally[answer.status === "Unchanged" ? "unchanged" : "done"] += 1;
      } catch (error) {
        tally.failed += 1;
        reason = error.message;
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_A_TIME, ids.length) }, work));
  report(action, tally, reason);
  return true;
}

export async function actOnAll(action, filter) {
  let found = null;
  try {
    found = await ask("POST", `/invocations/${action}`, { query: { ...filter, dry_run: true, limit: BULK_MAX }, patience: BULK_PATIENCE_MS });
  } catch (error) {
    // A node of an older release refuses the parameter, and has done nothing.
    if (error.status !== 400 || !error.message.includes("dry_run")) {
      toast(error.message, "worst");
      return false;
    }
  }
  if (found?.matched === 0) {
    toast("Nothing matches any more");
    return false;
  }
  const asked = counted(action, found ? found.matched : Infinity, Boolean(found));
  const detail = found?.more ? html`<p class="muted">More than ${number(BULK_MAX)} match: these are the first. Repeat it for the rest.</p>` : null;
  if (!(await confirm({ ...asked, detail, danger: true, matched: found ? found.matched : 11 }))) return false;
  const answer = await attempt(() => ask("POST", `/invocations/${action}`, { query: { ...filter, limit: BULK_MAX }, patience: BULK_PATIENCE_MS }));
  if (answer) report(action, answer, Object.keys(answer.reasons || {})[0]);
  return Boolean(answer);
}

function report(action, tally, reason) {
  const parts = [`${ACTIONS[action][0]}: ${number(tally.done)} done`];
  if (tally.unchanged) parts.push(`${number(tally.unchanged)} had nothing to change`);
  if (tally.failed) parts.push(`${number(tally.failed)} failed${reason ? ` (${reason})` : ""}`);
  toast(parts.join(", "), tally.failed ? "worst" : "good");
}

export const mayAct = () => may("operate");
