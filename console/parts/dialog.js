// Questions to the user, and short messages.
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { store, useStore } from "../lib/store.js";
import { route } from "../lib/router.js";
import { number } from "../lib/format.js";
import { Icon } from "./icons.js";

const TYPE_ABOVE = 10; // From here on a dangerous act wants its word typed.
const toasts = store([]);
const question = store(null);
let count = 0;

/** Ends when the user goes to another page: a question about the page before would stand over it. */
let place = route.get().path.join("/");
route.watch(({ path }) => {
  const before = place;
  place = path.join("/");
  const asked = question.get();
  if (before === place || !asked) return;
  question.set(null);
  asked.resolve(false);
});

export function toast(text, kind = "good") {
  const entry = { id: (count += 1), text, kind };
  toasts.set([...toasts.get().slice(-3), entry]);
  setTimeout(() => toasts.set(toasts.get().filter((each) => each !== entry)), kind === "worst" ? 9000 : 3500);
}

/** Whether the user agrees. `matched`: how many things it concerns; above ten, `word` must be typed. */
export function confirm({ title, text, word, matched = 1, danger = true, detail }) {
  return new Promise((resolve) => question.set({ title, text, word, matched, danger, detail, resolve }));
}

/** Runs an act, and says how it went. Returns its answer; undefined if it failed. */
export async function attempt(act, done) {
  try {
    const answer = await act();
    if (done) toast(typeof done === "function" ? done(answer) : done);
    return answer;
  } catch (error) {
    toast([error.message, error.hint].filter(Boolean).join(". "), "worst");
    return undefined;
  }
}

export function Dialog({ title, onClose, children, wide }) {
  const box = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    box.current.showModal();
    return () => before?.isConnected && before.focus();
  }, []);
  return html`<dialog ref=${box} class=${wide ? "wide" : ""} aria-label=${title} onClose=${onClose}
    onClick=${(event) => event.target === box.current && onClose()}>${children}</dialog>`;
}

function Question({ asked }) {
  const [typed, set] = useState("");
  const end = (answer) => {
    question.set(null);
    asked.resolve(answer);
  };
  const must = asked.danger && asked.matched > TYPE_ABOVE;
  return html`<${Dialog} title=${asked.title} onClose=${() => end(false)}>
    <form method="dialog" onSubmit=${(event) => {
      event.preventDefault();
      if (!must || typed === asked.word) end(true);
    }}>
      <h1>${asked.title}</h1>
      <p>${asked.text}</p>
      ${asked.detail}
      ${must && html`<label class="field">Type “${asked.word}” to go on
        <input id="confirm-word" value=${typed} onInput=${(event) => set(event.target.value.trim())} autocomplete="off" spellcheck=${false} autofocus /></label>`}
      <div class="actions">
        <button type="button" onClick=${() => end(false)} autofocus=${!must}>Keep as it is</button>
        <button type="submit" id="confirm" class=${`primary ${asked.danger ? "danger" : ""}`} disabled=${must && typed !== asked.word}>
          ${asked.word[0].toUpperCase() + asked.word.slice(1)}${asked.matched > 1 ? ` ${number(asked.matched)}` : ""}</button>
      </div>
    </form></${Dialog}>`;
}

export function Overlays() {
  const shown = useStore(toasts);
  const asked = useStore(question);
  return html`<div class="toasts" role="status" aria-live="polite">${shown.map((each) => html`<div key=${each.id} class=${`toast ${each.kind}`}>
      <${Icon} name=${each.kind === "worst" ? "warning" : "check"} size=${14} /><span class="grow">${each.text}</span></div>`)}</div>
    ${asked && html`<${Question} asked=${asked} key=${asked.title} />`}`;
}
