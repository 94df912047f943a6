// A time plot in SVG: a few lines over the last minutes, with the values under the pointer. Its colours follow the theme by CSS.
import { html, useLayoutEffect, useRef, useState } from "../lib/ui.js";
import { atClock } from "../lib/format.js";

const SPAN_MIN_S = 60;
const SPAN_MAX_S = 600;
const LEFT = 60;
const BOTTOM = 22;
const TOP = 6;
const ROOM = 1.12; // above the highest value
const GAP_S = 15; // A longer silence is a gap in the line.

/** Round values from 0 to at least `high`. */
export function ticksUpTo(high, count = 4) {
  if (!(high > 0)) return [0];
  const rough = high / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(high / size) + 1 }, (_, at) => at * size);
}

function pathOf(times, values, x, y) {
  let path = "";
  let before = null;
  for (let at = 0; at < times.length; at += 1) {
    const value = values[at];
    if (value === null || value === undefined) continue;
    path += `${before === null || times[at] - before > GAP_S ? "M" : "L"}${x(times[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    before = times[at];
  }
  return path;
}

/** `data`: [seconds, values of the first series, …]; `show(value)`: its text; the axis grows from one minute to ten. */
export function Plot({ series, data, show, label, height = 200 }) {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState(-1);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const [times, ...lines] = data;
  const end = times.length ? times[times.length - 1] : Date.now() / 1000;
  const span = Math.min(SPAN_MAX_S, Math.max(SPAN_MIN_S, end - times[0] || 0));
  const high = Math.max(0, ...lines.flatMap((values) => values.filter((value, index) => value !== null && times[index] >= end - span)));
  const x = (time) => LEFT + ((time - end + span) / span) * Math.max(1, width - LEFT - 4);
  const y = (value) => TOP + (1 - value / (high > 0 ? high * ROOM : 1)) * (height - TOP - BOTTOM);
  const minutes = [];
  const step = [15, 30, 60, 120, 300].find((each) => span / each <= (width > 480 ? 6 : 3)) || 300;
  for (let time = Math.ceil((end - span) / step) * step; time <= end; time += step) if (x(time) > LEFT + 16 && x(time) < width - 20) minutes.push(time);
  const under = (event) => {
    const from = box.current.getBoundingClientRect().left;
    let best = -1;
    times.forEach((time, index) => {
      if (time >= end - span && (best < 0 || Math.abs(x(time) + from - event.clientX) < Math.abs(x(times[best]) + from - event.clientX))) best = index;
    });
    setAt(best);
  };
  const place = at >= 0 && at < times.length ? at : -1;
  const latest = (values) => (place >= 0 ? values[place] : values.findLast((value) => value !== null && value !== undefined));
  return html`<figure class="plot" aria-label=${label}>
    <figcaption class="row wrap">${series.map((each, index) => {
      const value = latest(lines[index]);
      return html`<span class="plot-key"><i class=${`k-${each.token}${each.dash ? " dashed" : ""}`}></i>${each.label} <strong>${value === undefined || value === null ? "–" : show(value)}</strong></span>`;
    })}<span class="grow"></span><span class="muted">${place >= 0 ? atClock(times[place] * 1000) : ""}</span></figcaption>
    <div ref=${box} style=${{ height: `${height}px` }} onPointerMove=${under} onPointerLeave=${() => setAt(-1)}>
      ${width > 0 && html`<svg width=${width} height=${height} aria-hidden="true">
        ${ticksUpTo(high * ROOM).map((value) => html`<line class="grid" x1=${LEFT} x2=${width} y1=${y(value)} y2=${y(value)} /><text x=${LEFT - 8} y=${y(value) + 4} text-anchor="end">${value === 0 ? "0" : show(value)}</text>`)}
        ${minutes.map((time) => html`<text x=${x(time)} y=${height - 4} text-anchor="middle">${step < 60 ? atClock(time * 1000) : atClock(time * 1000).slice(0, 5)}</text>`)}
        ${series.map((each, index) => html`<path class=${`k-${each.token}`} d=${pathOf(times, lines[index], x, y)} stroke-dasharray=${each.dash ? "4 3" : undefined} />`)}
        ${place >= 0 && html`<line class="cursor" x1=${x(times[place])} x2=${x(times[place])} y1=${TOP} y2=${height - BOTTOM} />
          ${series.map((each, index) => (lines[index][place] === null || lines[index][place] === undefined ? null : html`<circle class=${`k-${each.token}`} cx=${x(times[place])} cy=${y(lines[index][place])} r="3" />`))}`}
        ${times.length < 2 && html`<text x=${LEFT + (width - LEFT) / 2} y=${height / 2} text-anchor="middle">The first values come in a few seconds</text>`}
      </svg>`}</div></figure>`;
}
