// Signing in. The token goes to the node once, as JSON, and is kept nowhere: the cookie that comes back is out of reach for scripts.
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { ask, session } from "../lib/api.js";
import { Icon } from "./icons.js";
import { Copy } from "./basics.js";

export function SignIn({ principal }) {
  const field = useRef(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => field.current.focus(), []);
  const submit = async (event) => {
    event.preventDefault();
    setProblem("");
    setBusy(true);
    try {
      const answer = await ask("POST", "/session", { body: { token: field.current.value.trim() } });
      field.current.value = "";
      session.set(answer);
    } catch (error) {
      setProblem(error.status ? error.message : "The node does not answer.");
      field.current?.select();
    }
    setBusy(false);
  };
  const command = "holdfast token create NAME --role read";
  return html`<div class="sign-in"><main class="card" aria-label="Sign in">
    <h1 class="brand"><${Icon} name="holdfast" size=${24} />Holdfast</h1>
    ${principal.signed_in && html`<p>The token of ${principal.name} may not see this page: it needs the role read.
      <button type="button" class="link" id="sign-out" onClick=${signOut}>Sign out</button></p>`}
    <form id="sign-in" onSubmit=${submit}>
      <label for="token">Token</label>
      <input id="token" ref=${field} type="password" autocomplete="off" spellcheck=${false} placeholder="hf_…" required />
      <button type="submit" class="primary" disabled=${busy}>Sign in</button>
      <p id="problem" role="alert">${problem}</p>
    </form>
    <p class="muted">An operator creates one:</p>
    <div class="code mono"><span>${command}</span><${Copy} text=${command} /></div>
  </main></div>`;
}

export async function signOut() {
  await ask("DELETE", "/session");
  session.set(await ask("GET", "/session"));
}
