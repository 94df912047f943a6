// Signing in and out. The token goes to the node once, as JSON, and is kept nowhere: the cookie that comes back is out of reach
// for scripts.
"use strict";

const form = document.getElementById("sign-in");
const signOut = document.getElementById("sign-out");

async function send(method, body) {
  const response = await fetch("/session", {
    method,
    credentials: "same-origin",
    headers: body === undefined ? {} : { "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  return { ok: response.ok, answer: await response.json() };
}

if (form !== null) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const field = document.getElementById("token");
    const problem = document.getElementById("problem");
    problem.textContent = "";
    try {
      const { ok, answer } = await send("POST", { token: field.value.trim() });
      if (ok) {
        field.value = "";
        location.replace("/");
        return;
      }
      problem.textContent = answer.message;
    } catch {
      problem.textContent = "The node does not answer.";
    }
    field.select();
  });

  // Browsers send no cookie with a link from another site. Somebody who is signed in gets the page with the second request.
  if (document.getElementById("signed-in") === null) {
    send("GET").then(({ answer }) => {
      if (answer.signed_in && !sessionStorage.getItem("tried")) {
        sessionStorage.setItem("tried", "yes");
        location.replace("/");
      }
    }, () => {});
  }
} else {
  sessionStorage.removeItem("tried");
}

if (signOut !== null) {
  signOut.addEventListener("click", async () => {
    await send("DELETE");
    location.replace("/");
  });
}
