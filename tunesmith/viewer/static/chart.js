// One metric of all visible runs, as a uPlot chart that is drawn when it comes into view.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { duration, num, runColor } from "./format.js";

const HEIGHT = 170;

// Exponential moving average without the bias of its start.
export function smooth(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function readStyle(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function fade(color) {
  return `${color}40`;
}

// Lines over steps or seconds; on a logarithmic scale without values that are not positive.
function buildData(series, { weight, x, y }) {
  const tables = [];
  const lines = [{ label: x }];
  for (const { run, steps, times, values, name } of series) {
    const color = runColor(run);
    const at = x === "time" ? times : steps;
    const points = { show: at.length < 2, size: 5 };
    const place = (each) => [at, y === "log" ? each.map((value) => (value > 0 ? value : null)) : each];
    if (weight > 0 && at.length > 2) {
      tables.push(place(values), place(smooth(values, weight)));
      lines.push({ stroke: fade(color), width: 1, points: { show: false }, label: `${name} (raw)` });
    } else {
      tables.push(place(values));
    }
    lines.push({ stroke: color, width: 1.5, points, label: name, spanGaps: true, value: (_, value) => num(value) });
  }
  return { data: tables.length ? uPlot.join(tables) : [[]], lines: lines.map((line) => ({ spanGaps: true, ...line })) };
}

export function Chart({ name, runs, hidden, look, version, theme }) {
  const box = useRef(null);
  const [isVisible, setVisible] = useState(false);
  const answer = useAnswer(isVisible ? "metric" : null, { name }, version);
  const [hover, setHover] = useState(null);
  useEffect(() => {
    const observer = new IntersectionObserver(([entry]) => entry.isIntersecting && setVisible(true), { rootMargin: "300px" });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const series = answer.data
    ? answer.data.series.filter(({ run, times }) => !hidden.has(run) && (look.x !== "time" || times[times.length - 1] > 0)).map((each) => ({ ...each, name: runs[each.run].name }))
    : null;
  useEffect(() => {
    if (!series) return undefined;
    const y = look.y === "log" && series.some(({ values }) => values.some((value) => value > 0)) ? "log" : "linear";
    const { data, lines } = buildData(series, { ...look, y });
    const showX = (value) => (look.x === "time" ? duration(value) : String(value));
    const axis = { stroke: readStyle("--dim"), grid: { stroke: readStyle("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 42 };
    const plot = new uPlot({
      width: box.current.clientWidth, height: HEIGHT, series: lines, legend: { show: false },
      axes: [{ ...axis, size: 24, values: (_, ticks) => ticks.map(showX) },
        { ...axis, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : String(Number(tick.toPrecision(4))))) }],
      scales: { x: { time: false }, y: { distr: y === "log" ? 3 : 1 } },
      cursor: { sync: { key: "metrics" }, points: { size: 5 } },
      hooks: { setCursor: [(u) => setHover(u.cursor.idx === null || u.cursor.idx === undefined ? null
        : { at: showX(u.data[0][u.cursor.idx]), values: lines.slice(1).map((line, index) => [line, u.data[index + 1][u.cursor.idx]]) })] },
    }, data, box.current);
    const resize = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    resize.observe(box.current);
    return () => { resize.disconnect(); plot.destroy(); };
  }, [answer.data, look.weight, look.x, look.y, theme, [...hidden].join()]);
  const shown = hover ? hover.values.filter(([line, value]) => !line.label.endsWith("(raw)") && value !== null && value !== undefined) : [];
  return html`<figure class="chart" data-metric=${name}><figcaption><b>${name}</b><span class="hover">${
    hover && html`${look.x === "time" ? "" : "step "}${hover.at} ${shown.map(([line, value]) => html` <em style=${{ color: line.stroke }}>${num(value)}</em>`)}`
  }</span></figcaption><div class="plot" ref=${box}></div>${answer.error && html`<p class="note">${answer.error}</p>`}</figure>`;
}
