// The overview: is all well, what happens now, what needs somebody.
import { html, useEffect, useMemo } from "../lib/ui.js";
import { useGet } from "../lib/api.js";
import { useStore } from "../lib/store.js";
import { rates, sample } from "../lib/rates.js";
import { href } from "../lib/router.js";
import { duration, number, plural } from "../lib/format.js";
import { ACTIVE, Status } from "../parts/status.js";
import { Code, Empty, Failure, Time } from "../parts/basics.js";
import { Plot } from "../parts/plot.js";
import { Icon } from "../parts/icons.js";

const SAMPLE = 500;

/** Messages that differ in ids and numbers alone are one kind of failure. */
const kindOf = (message) => message.replace(/\b[0-9a-f]{8,}\b|\d+/gi, "…");
/** The longest part of a message that all of its kind share. */
const shared = (message) => kindOf(message).split("…").reduce((best, each) => (each.length > best.length ? each : best), "").trim();

function Tile({ title, to, kind = "good", icon = "check", children }) {
  return html`<a class=${`card tile ${kind}`} href=${to}><span class="tile-head"><${Icon} name=${icon} size=${15} />${title}</span><span class="tile-body">${children}</span></a>`;
}

function ClusterTile() {
  const { data } = useGet("/cluster", {}, { kinds: ["cluster"], every: 15_000 });
  if (!data) return html`<${Tile} title="Cluster" to="#/cluster" kind="" icon="cluster">…</${Tile}>`;
  const nodes = data.nodes.filter((node) => node.state !== "removed");
  const up = nodes.filter((node) => node.connected).length;
  const led = data.partitions.filter((each) => each.leader).length;
  const bad = up < nodes.length || led < data.partitions.length;
  return html`<${Tile} title="Cluster" to="#/cluster" kind=${bad ? "worst" : "good"} icon=${bad ? "warning" : "check"}>
    <strong>${up}/${nodes.length}</strong> ${nodes.length === 1 ? "node" : "nodes"} · <strong>${led}/${data.partitions.length}</strong> partitions led
    ${data.changing && html`<span class="tile-note">${data.changing}</span>`}</${Tile}>`;
}

function EndpointsTile() {
  const { data } = useGet("/deployments", {}, { kinds: ["deployments"], every: 15_000 });
  if (!data) return html`<${Tile} title="Endpoints" to="#/services" kind="" icon="services">…</${Tile}>`;
  const bad = data.deployments.filter((each) => ["down", "stalled", "crashing"].includes(each.health.status));
  const worst = bad.find((each) => each.health.status === "down") || bad[0];
  const node = worst?.health.nodes.find((each) => each.down_since || each.stalled_since || each.restraint);
  return html`<${Tile} title="Endpoints" to="#/services" kind=${!worst ? "good" : worst.health.status === "down" ? "worst" : "worse"} icon=${worst ? "warning" : "check"}>
    <strong>${data.deployments.length - bad.length}</strong> up${worst && html` · <strong>${bad.length}</strong> ${worst.health.status}`}
    ${worst && html`<span class="tile-note clip" title=${node?.error || node?.stall || ""}>${worst.uri}: ${node?.down_since ? html`<${Time} at=${node.down_since} />, ${node.error}` : node?.stall || node?.restraint || ""}</span>`}</${Tile}>`;
}

function NeedsTile({ counts }) {
  const waiting = useGet("/waiting", { kind: "approval,in-doubt,awakeable,promise", limit: 500 }, { every: 15_000 }).data?.waiting || [];
  const doubt = waiting.filter((each) => each.kind === "in-doubt").length;
  const people = waiting.filter((each) => each.kind === "awakeable" || each.kind === "promise").length;
  const approvals = waiting.filter((each) => each.kind === "approval").length;
  const paused = counts?.paused || 0;
  const parts = [approvals && html`<strong>${approvals}</strong> ${approvals === 1 ? "approval" : "approvals"}`, people && html`<strong>${people}</strong> ${people === 1 ? "answer" : "answers"}`, doubt && html`<strong>${doubt}</strong> in doubt`, paused && html`<strong>${number(paused)}</strong> paused`].filter(Boolean);
  return html`<${Tile} title="Needs you" to="#/inbox" kind=${doubt || paused ? "worse" : people || approvals ? "" : "good"} icon=${doubt || paused ? "warning" : parts.length ? "inbox" : "check"}>
    ${parts.length ? parts.map((each, at) => html`${at ? " · " : ""}${each}`) : "Nothing waits for anybody"}</${Tile}>`;
}

function Counts({ counts }) {
  const total = ACTIVE.reduce((sum, name) => sum + (counts?.[name] || 0), 0);
  return html`<section class="card"><header><h2>In progress</h2><span class="muted">${number(total)} now, ${number(counts?.completed || 0)} completed and kept</span></header>
    <div class="body stack"><div class="strip" aria-hidden="true">${ACTIVE.map((name) => (counts?.[name] ? html`<i class=${`s-${name}`} style=${{ flexGrow: counts[name] }}></i>` : null))}</div>
      <div class="count-list">${ACTIVE.map((name) => html`<a href=${href(["invocations"], { status: name })}><${Status} of=${name} /><strong>${number(counts?.[name] || 0)}</strong></a>`)}</div></div></section>`;
}

function Failures() {
  const recent = useGet("/invocations", { outcome: "failed", since: "1h", limit: SAMPLE }, { every: 10_000 });
  const trying = useGet("/invocations", { status: "backing-off,paused", limit: SAMPLE }, { every: 10_000 });
  const groups = useMemo(() => {
    const found = new Map();
    const add = (row, query, what) => {
      const message = row.failure?.message || "";
      const key = [row.service, row.handler, kindOf(message), what].join("\0");
      const group = found.get(key) || { row, message, what, query: { service: row.service, handler: row.handler, ...query, ...(message && { failure: shared(message).slice(0, 120) }) }, count: 0 };
      group.count += 1;
      found.set(key, group);
    };
    for (const row of recent.data?.invocations || []) add(row, { outcome: "failed", since: "1h" }, "failed");
    for (const row of trying.data?.invocations || []) add(row, { status: row.status }, row.status);
    return [...found.values()].sort((a, b) => b.count - a.count).slice(0, 8);
  }, [recent.data, trying.data]);
  const cut = recent.data?.cursor || trying.data?.cursor;
  return html`<section class="card"><header><h2>What fails most</h2><span class="muted">last hour, and what is still tried${cut ? `; of the newest ${SAMPLE}` : ""}</span></header>
    ${recent.error && html`<div class="body"><${Failure} error=${recent.error} /></div>`}
    ${groups.length ? html`<div class="scroll-x"><table class="list"><tbody>${groups.map((each) => html`<tr><td class="right"><strong>${number(each.count)}</strong></td><td><a href=${href(["invocations"], each.query)}>${each.row.service}/${each.row.handler}</a></td>
      <td class="wide-cell"><span class="clip block" title=${each.message}>${each.message || html`<span class="faint">see its page</span>`}</span></td><td><${Status} of=${each.what} /></td></tr>`)}</tbody></table></div>`
      : recent.data && trying.data && html`<div class="body muted">Nothing failed in the last hour, and nothing backs off.</div>`}</section>`;
}

export default function Overview() {
  useEffect(sample, []);
  const known = useStore(rates);
  const services = useGet("/services", {}, { kinds: ["deployments"] });
  const throughput = useMemo(() => [known.times, known.accepted, known.completed, known.failed], [known.times]);
  const latency = useMemo(() => [known.times, known.ours, known.ours99, known.commit99], [known.times]);
  const perSecond = (value) => `${value < 10 ? value.toFixed(1) : number(Math.round(value))}/s`;
  if (services.data && !services.data.services.length) {
    return html`<div class="page"><div class="page-head"><h1>Overview</h1></div><div class="tiles"><${ClusterTile} /></div>
      <${Empty} icon="services" title="No services yet"><p>The cluster runs, and nothing is registered. Start your handlers, then register their endpoint:</p>
        <${Code} text="holdfast deployments register http://HOST:9080" /><a class="button" href=${href(["services"])}>Register here</a></${Empty}></div>`;
  }
  return html`<div class="page overview"><div class="page-head"><h1>Overview</h1><span class="muted">since you opened it, every 2 s</span></div>
    ${known.error && known.error.status !== 0 && html`<${Failure} error=${known.error} />`}
    <div class="tiles"><${ClusterTile} /><${EndpointsTile} /><${NeedsTile} counts=${known.by_status} /></div>
    <div class="two-columns">
      <section class="card"><header><h2>Throughput</h2><span class="muted">whole cluster</span></header><div class="body">
        <${Plot} label="Invocations per second" data=${throughput} show=${perSecond} series=${[{ label: "accepted", token: "running" }, { label: "completed", token: "succeeded" }, { label: "failed attempts and ends", token: "failed", dash: true }]} /></div></section>
      <section class="card"><header><h2>Latency</h2><span class="muted">this node</span></header><div class="body">
        <${Plot} label="Latency" data=${latency} show=${duration} series=${[{ label: "answer p50", token: "accent" }, { label: "answer p99", token: "suspended" }, { label: "commit p99", token: "backing-off", dash: true }]} /></div></section>
    </div>
    <div class="two-columns"><${Counts} counts=${known.by_status} /><${Failures} /></div>
  </div>`;
}
