// The list of invocations: filters, counts by status, live changes, acts on many.
import { Component, classes, html, useCallback, useEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { connection, get, may, useGet, useReturn } from "../lib/api.js";
import { useStore } from "../lib/store.js";
import { live, onEvents, pause } from "../lib/live.js";
import { go, href, setQuery } from "../lib/router.js";
import { duration, exact, ms, now, number, relative, shortId } from "../lib/format.js";
import { useKeys } from "../lib/keys.js";
import { ACTIVE, ENDS, Status, statusOf, word } from "../parts/status.js";
import { Code, Copy, Empty, Failure, Loading, Menu, Virtual, useNarrow } from "../parts/basics.js";
import { ACTIONS, actOnAll, actOnSome } from "../parts/actions.js";
import { Filters, filterOf } from "../parts/filters.js";
import { Icon } from "../parts/icons.js";

const PAGE = 200;
const REFRESH_MAX = 1000;
const BUSY_MS = 700;
const EVENT_FIELDS = ["status", "end", "since", "attempts"];

/** Rows of the list: pages as they are scrolled to, and changes as they come. */
function useRows(filter) {
  const key = JSON.stringify(filter);
  const [state, set] = useState({ key, rows: null, cursor: null, error: null });
  const latest = useRef(state);
  const loading = useRef(false);
  const put = (next) => set((latest.current = next));
  const load = useCallback(async (cursor, limit, merge) => {
    if (loading.current) return;
    loading.current = true;
    try {
      const answer = await get("/invocations", { ...filter, limit, cursor });
      const old = latest.current.key === key ? latest.current : { rows: null, cursor: null };
      put({ key, error: null, ...merge(old, answer) });
    } catch (error) {
      put({ key, rows: latest.current.key === key ? latest.current.rows : null, cursor: latest.current.cursor, error });
    }
    loading.current = false;
  }, [key]);
  const refresh = useCallback(() => {
    const loaded = latest.current.key === key ? latest.current.rows?.length || 0 : 0;
    return load(undefined, Math.min(REFRESH_MAX, Math.max(PAGE, loaded)), (old, answer) => merged(old, answer, filter.order === "oldest"));
  }, [load]);
  const more = useCallback(() => {
    const { cursor, rows } = latest.current;
    if (cursor && latest.current.key === key) {
      load(cursor, rows.length < PAGE * 2 ? PAGE : REFRESH_MAX, (old, answer) => {
        const known = new Set(old.rows.map((each) => each.id));
        return { rows: [...old.rows, ...answer.invocations.filter((each) => !known.has(each.id))], cursor: answer.cursor };
      });
    }
  }, [load]);
  useEffect(() => {
    loading.current = false;
    refresh();
  }, [refresh]);
  useReturn(refresh);
  useEffect(() => {
    let timer = 0;
    const later = () => {
      timer ||= setTimeout(() => {
        timer = 0;
        refresh();
      }, BUSY_MS);
    };
    const { service, handler, key: ofKey } = filter;
    const wanted = Object.fromEntries(Object.entries({ service, handler, key: ofKey }).filter(([, value]) => value));
    const end = onEvents(["invocation"], (events) => {
      const current = latest.current;
      if (current.key !== key || !current.rows) return;
      const changes = new Map();
      for (const { kind, data } of events) {
        if (kind === "invocation") changes.set(data.id, data);
        else later();
      }
      if (!changes.size) return;
      const seen = new Set();
      const rows = current.rows.map((row) => {
        const change = changes.get(row.id);
        if (!change) return row;
        seen.add(row.id);
        return { ...row, ...Object.fromEntries(EVENT_FIELDS.map((name) => [name, change[name]])) };
      }).filter((row) => !seen.has(row.id) || matches(row, filter));
      put({ ...current, rows });
      if (seen.size < changes.size) later();
    }, wanted);
    return () => {
      clearTimeout(timer);
      end();
    };
  }, [key, refresh]);
  const current = state.key === key ? state : { rows: null, cursor: null, error: null };
  return { ...current, more, refresh };
}

/** What was asked again replaces what it covers; rows behind it stay. */
function merged(old, answer, oldest) {
  const fresh = answer.invocations;
  if (!old.rows || !answer.cursor || old.rows.length <= fresh.length) return { rows: fresh, cursor: answer.cursor };
  const known = new Set(fresh.map((each) => each.id));
  const edge = ms(fresh[fresh.length - 1].created_at);
  const behind = old.rows.filter((each) => !known.has(each.id) && (oldest ? ms(each.created_at) >= edge : ms(each.created_at) <= edge));
  return { rows: [...fresh, ...behind], cursor: old.cursor };
}

function matches(row, { status, outcome }) {
  if (outcome) return outcome.split(",").includes(row.end);
  return !status || status.split(",").some((each) => each === row.status || (each === "active" && row.status !== "completed"));
}

function useCounts(service) {
  const asked = useGet("/statistics", {}, { every: 5000 });
  const older = useGet(asked.error?.missing ? "/services" : null, {}, { every: 5000 });
  if (asked.data) return (service ? asked.data.services[service] : asked.data.totals)?.by_status || {};
  if (!older.data) return null;
  const sums = {};
  for (const each of older.data?.services || []) {
    if (service && each.name !== service) continue;
    for (const [status, count] of Object.entries(each.invocations)) sums[status] = (sums[status] || 0) + count;
  }
  return sums;
}

function Facets({ query }) {
  const counts = useCounts(query.service);
  const precise = !Object.keys(filterOf(query)).some((name) => !["status", "outcome", "service", "order"].includes(name));
  const chosen = new Set([...(query.status || "").split(","), ...(query.outcome || "").split(",")].filter(Boolean));
  const toggle = (name, kind) => {
    const own = new Set(((kind === "status" ? query.status : query.outcome) || "").split(",").filter(Boolean));
    own.delete(name) || own.add(name);
    setQuery({ status: "", outcome: "", [kind]: [...own].join(",") });
  };
  const total = Object.values(counts || {}).reduce((sum, each) => sum + each, 0);
  const facet = (name, kind, count) => html`<button type="button" key=${name} class="facet" aria-pressed=${chosen.has(name) ? "true" : "false"} onClick=${() => toggle(name, kind)}>
    <${Status} of=${name} />${precise && count !== undefined ? html`<span class="count">${number(count)}</span>` : null}</button>`;
  return html`<div class="facets" role="group" aria-label="Status">
    <button type="button" class="facet" aria-pressed=${chosen.size ? "false" : "true"} onClick=${() => setQuery({ status: "", outcome: "" })}>All${precise && total ? html`<span class="count">${number(total)}</span>` : null}</button>
    ${ACTIVE.map((name) => facet(name, "status", counts ? counts[name] ?? 0 : undefined))}
    <span class="divide"></span>
    ${ENDS.map((name) => facet(name, "outcome"))}
  </div>`;
}

function Live() {
  const { mode: stream, paused } = useStore(live);
  const mode = useStore(connection).up ? stream : "connecting";
  const says = paused ? "paused" : { live: "live", polling: "every 2.5 s", connecting: "reconnecting" }[mode] || "";
  return html`<span class=${classes("live", !paused && mode === "live" && "on", mode === "connecting" && "slow")}>
    <span class="dot" aria-hidden="true"></span>${says}
    <button type="button" class="bare small" onClick=${() => pause(!paused)}><${Icon} name=${paused ? "play" : "pause"} size=${13} />${paused ? "Resume" : "Pause"}</button></span>`;
}

function tookOf(row, at) {
  const from = ms(row.created_at);
  return (row.status === "completed" ? ms(row.completed_at || row.since) : at) - from;
}

/** From 1 ms to a day, on a logarithmic scale. */
const barOf = (took) => `${Math.min(100, Math.max(3, (Math.log10(Math.max(1, took)) / Math.log10(86_400_000)) * 100))}%`;

function note(row) {
  const failure = row.failure;
  if (failure && row.end !== "succeeded") return html`<span class=${["cancelled", "killed"].includes(row.end) ? "muted" : row.status === "completed" || row.status === "paused" ? "bad" : "warn"} title=${failure.message}>${failure.message}</span>`;
  if (row.failures > 1) return html`<span class="warn">${number(row.failures)} failures</span>`;
  if (row.lost_streams) return html`<span class="muted">${row.lost_streams} lost streams</span>`;
  return null;
}

/** Drawn again only if something of it changed: thousands of rows pass by while somebody scrolls. */
class Row extends Component {
  shouldComponentUpdate(next) {
    return ["row", "chosen", "current", "at", "narrow", "index", "select"].some((name) => next[name] !== this.props[name]);
  }

  render(props) {
    return drawRow(props);
  }
}

function drawRow({ row, place, chosen, current, select, at, narrow, index }) {
  const status = statusOf(row);
  const took = tookOf(row, at);
  const created = html`<time datetime=${row.created_at} title=${exact(row.created_at)}>${relative(row.created_at, at)}</time>`;
  const box = select && html`<span role="cell" class="pick"><input type="checkbox" checked=${chosen} aria-label=${`Select ${shortId(row.id)}`} onClick=${(event) => event.stopPropagation()} onChange=${() => select(row.id)} /></span>`;
  const target = html`<a href=${href(["invocations", row.id])} class="target">${row.service}<span class="faint">/</span>${row.handler}</a>`;
  const open = (event) => !event.target.closest("a, button, input") && go(["invocations", row.id]);
  const common = { class: classes("line", "invocation-row", narrow && "two", current && "current", chosen && "chosen"), style: place, role: "row", "aria-rowindex": index + 2, onClick: open, key: row.id };
  if (narrow) {
    return html`<div ...${common}>${box}<span role="cell" class="grow"><span class="row"><${Status} of=${status} /><span class="grow"></span><span class="muted">${created}</span></span>
      <span class="row"><span class="clip grow">${target} <span class="mono muted">${row.key || ""}</span></span><span class="muted nowrap">${duration(took)}</span></span></span></div>`;
  }
  return html`<div ...${common}>${box || html`<span role="cell"></span>`}
    <span role="cell"><${Status} of=${status} /></span>
    <span role="cell" class="clip">${target}</span>
    <span role="cell" class="clip mono">${row.key || html`<span class="faint">–</span>`}</span>
    <span role="cell" class="id muted"><span title=${row.id}>${shortId(row.id)}</span><${Copy} text=${row.id} label=${`Copy ${shortId(row.id)}`} /></span>
    <span role="cell" class="muted">${created}</span>
    <span role="cell" class=${`took s-${status}`}><i><b style=${{ width: barOf(took) }}></b></i><span>${duration(took)}</span></span>
    <span role="cell" class=${row.attempts > 1 ? "count" : "count faint"}>${row.attempts ? number(row.attempts) : "–"}</span>
    <span role="cell" class="clip">${note(row)}</span></div>`;
}

const HEAD = ["Status", "Target", "Key", "Id", "Created", "Took", "Attempts", "Says"];

function Nothing({ filtered, services }) {
  if (filtered) {
    return html`<${Empty} icon="search" title="Nothing matches"><p>No invocation has all of these properties. Completed ones are forgotten after their retention.</p>
      <button type="button" onClick=${() => go(["invocations"])}>Show all</button></${Empty}>`;
  }
  const first = services.find((each) => each.kind === "service") || services[0];
  if (!first) {
    return html`<${Empty} icon="services" title="No services yet"><p>Start your handlers, then register their endpoint:</p><${Code} text="holdfast deployments register http://HOST:9080" /></${Empty}>`;
  }
  const path = [first.name, ...(first.kind === "service" ? [] : ["KEY"]), first.handlers[0]].join("/");
  return html`<${Empty} icon="invocations" title="No invocations yet"><p>Send one to the ingress of any node, or try a handler on the page of its service:</p>
    <${Code} text=${`curl http://NODE:8080/${path}/send --json '…'`} /><a class="button" href=${href(["services", first.name])}>Open ${first.name}</a></${Empty}>`;
}

export default function Invocations({ query }) {
  const filter = filterOf(query);
  const { rows, cursor, error, more, refresh } = useRows(filter);
  const services = useGet("/services").data?.services || [];
  const at = useStore(now);
  const narrow = useNarrow("(max-width: 860px)");
  const [selected, setSelected] = useState(new Set());
  const [all, setAll] = useState(false);
  const [row, setRow] = useState(-1);
  const operator = may("operate");
  const key = JSON.stringify(filter);
  useEffect(() => {
    setSelected(new Set());
    setAll(false);
    setRow(-1);
  }, [key]);
  const select = useCallback((id) => {
    setAll(false);
    setSelected((old) => {
      const next = new Set(old);
      next.delete(id) || next.add(id);
      return next;
    });
  }, []);
  const list = rows || [];
  const move = (by) => setRow((old) => Math.min(list.length - 1, Math.max(0, old + by)));
  useKeys({
    "/": ["Add a filter", () => document.getElementById("add-filter")?.closest("button").click()],
    j: ["Next row", () => move(1)],
    k: ["Previous row", () => move(-1)],
    Enter: ["Open the row", () => list[row] && go(["invocations", list[row].id])],
    ...(operator ? { x: ["Select the row", () => list[row] && select(list[row].id)] } : {}),
  });
  const everything = list.length > 0 && selected.size >= list.length;
  const shown = useMemo(() => Object.keys(ACTIONS).filter((action) => action !== "restart"), []);
  const act = async (action) => {
    const done = all ? await actOnAll(action, Object.keys(filter).length ? filter : { status: "active,completed" }) : await actOnSome(action, [...selected]);
    if (!done) return;
    setSelected(new Set());
    setAll(false);
    refresh();
  };
  const head = !narrow && html`<div class="invocation-row head" role="row">
    <span role="columnheader">${operator ? html`<input type="checkbox" aria-label="Select all that are loaded" checked=${everything} onChange=${() => {
      setAll(false);
      setSelected(everything ? new Set() : new Set(list.map((each) => each.id)));
    }} />` : html`<span class="hidden-text">Selection</span>`}</span>${HEAD.map((name) => html`<span role="columnheader" class=${name === "Attempts" ? "count" : ""}>${name}</span>`)}</div>`;
  return html`<div class="page fills invocations">
    <div class="page-head"><h1>Invocations</h1><${Live} /></div>
    <${Facets} query=${query} />
    <div class="row wrap between"><${Filters} query=${query} services=${services} />
      ${selected.size > 0 && html`<div class="bulk row wrap" role="group" aria-label="Selected invocations">
        <strong>${all ? "All that match" : `${number(selected.size)} selected`}</strong>
        ${!all && everything && cursor && html`<button type="button" class="link" onClick=${() => setAll(true)}>Select all that match</button>`}
        ${shown.slice(0, 3).map((action) => html`<button type="button" class="small" onClick=${() => act(action)}>${ACTIONS[action][0]}</button>`)}
        <${Menu} cls="small" icon="more" toRight label=${html`<span class="hidden-text">More</span>`}>${(close) => shown.slice(3).map((action) => html`<button type="button" class="danger" onClick=${() => {
          close();
          act(action);
        }}>${ACTIONS[action][0]}</button>`)}</${Menu}>
        <button type="button" class="link" onClick=${() => setSelected(new Set())}>Clear</button></div>`}
    </div>
    ${error && !error.missing ? html`<${Failure} error=${error} retry=${refresh} />` : null}
    ${!rows && !error && html`<${Loading} />`}
    ${rows && !list.length && html`<${Nothing} filtered=${Object.keys(filter).length > 0} services=${services} />`}
    ${list.length > 0 && html`<div class="lines"><${Virtual} rows=${list} height=${narrow ? 60 : 36} label="Invocations" columns=${narrow ? 1 : 9} more=${cursor ? more : null} top=${head} atRow=${row}
      line=${(each, index, place) => html`<${Row} key=${each.id} row=${each} index=${index} place=${place} at=${at} narrow=${narrow} chosen=${all || selected.has(each.id)} current=${index === row} select=${operator ? select : null} />`} />
      <div class="foot muted" role="status">${number(list.length)}${cursor ? " loaded, more below" : list.length === 1 ? " invocation" : " invocations"}${filter.status || filter.outcome ? ` · ${[filter.status, filter.outcome].filter(Boolean).join(",").split(",").map(word).join(", ")}` : ""}</div></div>`}
  </div>`;
}
