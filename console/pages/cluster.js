// The cluster: its nodes, who leads which partition, snapshots and backups.
import { classes, html, useEffect, useRef, useState } from "../lib/ui.js";
import { ask, may, post, segment, useGet } from "../lib/api.js";
import { bytes, duration, number, plural } from "../lib/format.js";
import { Code, Empty, Failure, Loading, Menu, Notice, Time } from "../parts/basics.js";
import { Dialog, attempt, confirm } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";

const LAG_SHADES = [[0, ""], [1, "lag-1"], [100, "lag-2"], [10_000, "lag-3"]];

function stateOf(node) {
  if (node.state === "removed") return ["", "removed"];
  if (node.condition && !["ok", "up", "active"].includes(node.condition)) return [/drain/.test(node.condition) ? "worse" : "worst", node.condition];
  if (!node.connected) return ["worst", "not connected"];
  if (node.disk_full) return ["worst", "disk full"];
  if (node.state === "draining" || node.state === "drained") return ["worse", node.state];
  return ["good", node.state === "active" ? "up" : node.state];
}

function Disk({ disk }) {
  const used = 1 - disk.free / disk.total;
  return html`<span class="row"><span class=${classes("gauge", used > 0.9 && "worst", used > 0.8 && "worse")}><i style=${{ width: `${(used * 100).toFixed(1)}%` }}></i></span><span>${bytes(disk.free)} free</span></span>`;
}

function Node({ node, answers, reload }) {
  const [kind, says] = stateOf(node);
  const drained = node.state === "draining" || node.state === "drained";
  const act = async (action, query, text) => {
    if (!(await confirm({ title: `${action[0].toUpperCase()}${action.slice(1)} ${node.name}?`, text, word: action, danger: action !== "undrain", matched: action === "remove" ? 11 : 1 }))) return;
    await attempt(() => post(`/cluster/nodes/${segment(node.name)}/${action}`, query), `${node.name}: ${action} is under way`);
    reload();
  };
  const away = node.admin_url && !answers && node.connected;
  return html`<article class=${classes("card", "node", kind)}><header><h2>${node.name}${answers && html` <span class="faint">this node</span>`}</h2><span class=${`tag ${kind}`}>${says}</span>
      ${may("operate") && node.state !== "removed" && html`<${Menu} cls="bare small" icon="more" toRight label=${html`<span class="hidden-text">Actions of ${node.name}</span>`}>${(close) => html`
        ${drained ? html`<button type="button" onClick=${() => {
          close();
          act("undrain", {}, "It receives leaderships again.");
        }}>Undrain</button>` : html`<button type="button" onClick=${() => {
          close();
          act("drain", {}, `Its ${plural(node.leads, "leadership")} move to other nodes. Requests continue.`);
        }}>Drain</button><button type="button" onClick=${() => {
          close();
          act("drain", { move: true }, `Its ${plural(node.leads, "leadership")} and ${plural(node.replicas, "replica")} move to other nodes. Large states take a while.`);
        }}>Drain, and move its replicas</button>`}
        <button type="button" class="danger" onClick=${() => {
          close();
          act("remove", {}, `${node.name} leaves for good, and its ${plural(node.replicas, "replica")} are made again on other nodes. Its name cannot come back.`);
        }}>Remove</button>`}</${Menu}>`}</header>
    <dl class="facts body">
      <dt>Leads</dt><dd>${number(node.leads)} of ${plural(node.replicas, "replica")}</dd>
      ${node.uptime_s != null && html`<dt>Up for</dt><dd>${duration(node.uptime_s * 1000)}</dd>`}
      ${node.disk && html`<dt>Disk</dt><dd><${Disk} disk=${node.disk} /></dd>`}
      ${node.memory_bytes != null && html`<dt>Memory</dt><dd>${bytes(node.memory_bytes)}</dd>`}
      ${node.loop_lag_ms != null && html`<dt>Loop lag</dt><dd class=${node.loop_lag_ms > 50 ? "warn" : ""}>${duration(node.loop_lag_ms)}</dd>`}
      <dt>Release</dt><dd>${node.version || html`<span class="faint">unknown</span>`}</dd>
      <dt>Address</dt><dd class="mono">${node.address}${node.zone ? ` · ${node.zone}` : ""}</dd>
      ${node.error && html`<dt>Link</dt><dd class="bad">${node.error}</dd>`}
      ${away && html`<dt>Console</dt><dd><a href=${node.admin_url} rel="noreferrer">${node.admin_url}</a></dd>`}
    </dl></article>`;
}

const lagClass = (lag) => LAG_SHADES.reduce((found, [from, name]) => (lag >= from ? name : found), "");

function Matrix({ cluster, reload }) {
  const nodes = cluster.nodes.filter((node) => node.state !== "removed");
  const [chosen, choose] = useState(null);
  const leaders = useRef(new Map());
  const moved = new Set();
  for (const each of cluster.partitions) {
    const before = leaders.current.get(each.partition);
    if (before !== undefined && before !== each.leader) moved.add(each.partition);
  }
  useEffect(() => {
    leaders.current = new Map(cluster.partitions.map((each) => [each.partition, each.leader]));
  }, [cluster]);
  const cell = (each, node) => {
    const member = each.members.includes(node.name);
    const lead = each.leader === node.name;
    const lag = each.follower_lag?.[node.name];
    const says = lead ? "leader" : member ? `follower${lag ? `, ${plural(lag, "entry", "entries")} behind` : ""}` : each.learners?.includes(node.name) ? "learner" : "no replica";
    const sign = lead ? "●" : member ? "○" : each.learners?.includes(node.name) ? "◌" : "";
    return html`<td key=${node.name} class=${classes("cell", lead && "lead", lead && moved.has(each.partition) && "moved", member && lagClass(lag || 0))} title=${`Partition ${each.partition} on ${node.name}: ${says}`}><span aria-hidden="true">${sign}</span><span class="hidden-text">${says}</span></td>`;
  };
  const one = cluster.partitions.find((each) => each.partition === chosen);
  return html`<section class="card"><header><h2>Partitions</h2><span class="legend muted"><span>● leader</span><span>○ follower</span><span>◌ learner</span><span class="lag-key">shaded: further behind</span></span></header>
    <div class="scroll-x" tabindex="0"><table class="matrix"><thead><tr><th scope="col">Partition</th>${nodes.map((node) => html`<th scope="col">${node.name}</th>`)}<th scope="col" class="right">Applied</th><th scope="col">Snapshot</th><th><span class="hidden-text">Actions</span></th></tr></thead><tbody>
      ${cluster.partitions.map((each) => html`<tr key=${each.partition}><th scope="row">${each.partition}${!each.leader && html` <span class="tag worst">no leader</span>`}</th>${nodes.map((node) => cell(each, node))}
        <td class="right muted">${each.applied === undefined ? "" : number(each.applied)}</td><td class="muted nowrap">${each.snapshot ? each.snapshot.age_s === null ? "none yet" : `${duration(each.snapshot.age_s * 1000)} old` : ""}</td>
        <td class="right">${may("operate") && html`<button type="button" class="bare small" aria-label=${`Actions of partition ${each.partition}`} onClick=${() => choose(each.partition)}><${Icon} name="more" /></button>`}</td></tr>`)}
    </tbody></table></div>
    ${one && html`<${Partition} partition=${one} close=${() => choose(null)} reload=${reload} />`}</section>`;
}

function Partition({ partition, close, reload }) {
  const others = partition.members.filter((name) => name !== partition.leader);
  const run = async (act, done) => {
    close();
    await attempt(act, done);
    reload();
  };
  const base = `/cluster/partitions/${partition.partition}`;
  return html`<${Dialog} title=${`Partition ${partition.partition}`} onClose=${close}><div class="dialog-body"><h1>Partition ${partition.partition}</h1>
    <dl class="facts"><dt>Leader</dt><dd>${partition.leader || "none"}</dd><dt>Members</dt><dd>${partition.members.join(", ")}</dd>${partition.term !== undefined && html`<dt>Term</dt><dd>${partition.term}</dd><dt>Committed</dt><dd>${number(partition.commit)}, ${number(partition.apply_lag)} not applied yet</dd>`}
      ${partition.snapshot?.error && html`<dt>Snapshot</dt><dd class="bad">${partition.snapshot.error}</dd>`}</dl>
    <div class="actions">${others.map((name) => html`<button type="button" onClick=${() => run(() => post(`${base}/transfer`, { to: name }), `${name} leads partition ${partition.partition}`)}>Let ${name} lead</button>`)}
      <button type="button" onClick=${() => run(() => post(`${base}/snapshot`), "The snapshot is cut")}>Snapshot now</button><button type="button" onClick=${close} autofocus>Close</button></div></div></${Dialog}>`;
}

function Backups({ snapshots }) {
  const asked = useGet("/cluster/backups", {}, { every: 5000 });
  const [to, setTo] = useState("");
  const begin = async (event) => {
    event.preventDefault();
    if (await attempt(() => post("/cluster/backups", {}, { to: to.trim() }), "The backup has started")) setTo("");
    asked.reload();
  };
  const list = asked.data?.backups || [];
  return html`<section class="card"><header><h2>Backups</h2><span class="muted">of this node, since it came up</span></header>
    ${asked.error && html`<div class="body"><${Failure} error=${asked.error} /></div>`}
    ${list.length > 0 && html`<div class="scroll-x" tabindex="0"><table class="list"><tbody>${list.map((each) => html`<tr><td><span class=${`tag ${{ succeeded: "good", failed: "worst", running: "worse" }[each.status] || ""}`}>${each.status}</span></td><td class="mono">${each.to}</td><td>${each.progress || ""}</td><td><${Time} at=${each.started_at || each.created_at} /></td><td class="bad">${each.error || ""}</td>
      <td class="right">${may("operate") && each.status === "running" && html`<button type="button" class="small danger" onClick=${() => attempt(() => ask("DELETE", `/cluster/backups/${segment(each.id)}`), "Cancelled")}>Cancel</button>`}</td></tr>`)}</tbody></table></div>`}
    <div class="body stack">${!list.length && html`<p class="muted">None yet. A backup is a consistent copy of every partition; <code>holdfast restore</code> founds a new cluster from it.</p>`}
      ${may("operate") && html`<form class="row" onSubmit=${begin}><input aria-label="Place of the backup" placeholder="s3://bucket/prefix, or a directory that all nodes share" value=${to} onInput=${(event) => setTo(event.target.value)} required spellcheck=${false} /><button type="submit">Back up</button></form>`}
      <p class="muted">Snapshots: ${snapshots.store ? html`shared store <code>${snapshots.store}</code>` : html`each node keeps its own in <code>${snapshots.directory}</code>`}${snapshots.error && html`. <span class="bad">${snapshots.error}</span>`}</p></div></section>`;
}

function Add({ close, reload }) {
  const [name, setName] = useState("");
  const [address, setAddress] = useState("");
  const [zone, setZone] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    if (await attempt(() => post("/cluster/nodes", {}, { name, address, ...(zone ? { zone } : {}) }), `${name} may join`)) {
      close();
      reload();
    }
  };
  return html`<${Dialog} title="Add a node" onClose=${close} wide><form onSubmit=${submit}><h1>Add a node</h1>
    <label class="field">Name<input value=${name} onInput=${(event) => setName(event.target.value)} required autofocus placeholder="n4" /></label>
    <label class="field">Address of its peer port<input value=${address} onInput=${(event) => setAddress(event.target.value)} required placeholder="n4.internal:7070" /></label>
    <label class="field">Zone <span class="faint">optional</span><input value=${zone} onInput=${(event) => setZone(event.target.value)} /></label>
    <p class="muted">Then start it there, with the same cluster name and secret, and with the nodes of this cluster as its peers:</p>
    <${Code} text=${`holdfast serve --node ${name || "NAME"} --config holdfast.toml`} />
    <div class="actions"><button type="button" onClick=${close}>Close</button><button type="submit" class="primary">Add</button></div></form></${Dialog}>`;
}

export default function Cluster() {
  const asked = useGet("/cluster", {}, { kinds: ["cluster"], every: 2000 });
  const [adding, setAdding] = useState(false);
  const cluster = asked.data;
  if (asked.error && !cluster) return html`<div class="page"><${Failure} error=${asked.error} retry=${asked.reload} /></div>`;
  if (!cluster) return html`<div class="page"><${Loading} /></div>`;
  return html`<div class="page"><div class="page-head"><h1>Cluster</h1><span class="muted">${plural(cluster.partitions.length, "partition")}, ${plural(cluster.replication, "replica")} each, level ${cluster.level}</span>${may("operate") && html`<button type="button" onClick=${() => setAdding(true)}><${Icon} name="plus" />Add a node</button>`}</div>
    ${cluster.changing && html`<${Notice} icon="restart">${cluster.changing}</${Notice}>`}
    ${!cluster.linearizable.members && html`<${Notice} kind="worst" icon="warning"><strong>The meta group has no leader.</strong> The list of nodes may be old, and nothing about nodes can change until a majority of them is connected. Invocations in partitions with a leader continue.</${Notice}>`}
    <div class="nodes">${cluster.nodes.map((node) => html`<${Node} key=${node.name} node=${node} answers=${node.name === cluster.answered_by} reload=${asked.reload} />`)}</div>
    <${Matrix} cluster=${cluster} reload=${asked.reload} />
    <${Backups} snapshots=${cluster.snapshots} />
    ${adding && html`<${Add} close=${() => setAdding(false)} reload=${asked.reload} />`}</div>`;
}
