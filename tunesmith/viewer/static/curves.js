// Reward and metric curves of runs side by side.
import { html } from "./vendor/htm-preact.js";
import { Chart } from "./chart.js";
import { num, runColor } from "./format.js";
import { Choice, Filter, Note, Table } from "./parts.js";
import { link, setParams } from "./route.js";
import { Tags } from "./run.js";

const PINNED = ["rollout/reward_mean", "rollout/reward_std", "rollout/num_failed", "rollout/sampled_tokens_mean",
  "experience/num_useful_groups", "train/loss", "train/grad_norm", "train/entropy", "perf/step_s"];

function groupNames(names, wanted) {
  const chosen = names.filter((name) => name.toLowerCase().includes(wanted.toLowerCase()));
  const pinned = chosen.filter((name) => PINNED.includes(name) || /^eval\/.*\/reward$/.test(name));
  pinned.sort((a, b) => rank(a) - rank(b));
  const groups = new Map(pinned.length ? [["main", pinned]] : []);
  for (const name of chosen) {
    const prefix = name.split("/")[0];
    groups.set(prefix, [...(groups.get(prefix) || []), name]);
  }
  return [...groups];
}

function rank(name) {
  return name === "rollout/reward_mean" ? -2 : name.startsWith("eval/") ? -1 : PINNED.indexOf(name);
}

function RunTable({ runs, hidden }) {
  const toggle = (id) => {
    const next = new Set(hidden);
    if (!next.delete(id)) next.add(id);
    setParams({ hide: [...next].join(",") });
  };
  return html`<${Table} className="list runs" rows=${runs} keyOf=${(run) => run.id} columns=${[
    ["shown", "", (run) => html`<input type="checkbox" aria-label=${`show ${run.name}`} checked=${!hidden.has(run.id)} onChange=${() => toggle(run.id)} style=${{ accentColor: runColor(run.id) }} />`],
    ["run", "", (run) => html`<a href=${link("run", [run.id])} title=${run.path}><i class="swatch" style=${{ background: runColor(run.id) }}></i>${run.name}</a>`],
    ["state", "", (run) => html`<span class="state ${run.state}" title=${run.stop_reason || (run.error && run.error.message) || ""}>${run.state}</span>`],
    ["steps", "r", (run) => html`${run.last_step}${run.total_steps ? html`<span class="dim"> / ${run.total_steps}</span>` : ""}`],
    ["reward", "r", (run) => (run.reward.length ? num(run.reward[0]) : "–")], ["algorithm", "", (run) => run.algorithm || ""],
    ["model", "clip", (run) => html`<span title=${run.model || ""}>${(run.model || "").split("/").slice(-2).join("/")}</span>`],
    ["tags and note", "main", (run) => html`<${Tags} tags=${run.tags} /> <span class="dim">${run.note}</span>`],
  ]} />`;
}

export function Curves({ app, params }) {
  const chosen = app.runs.filter((run) => `${run.name} ${run.tags.join(" ")} ${run.note}`.toLowerCase().includes((params.runs || "").toLowerCase()));
  const hidden = new Set((params.hide || "").split(",").filter(Boolean).map(Number));
  const left = new Set([...hidden, ...app.runs.filter((run) => !chosen.includes(run)).map((run) => run.id)]);
  const look = { weight: Number(params.smooth || 0), x: params.x || "step", y: params.y || "linear" };
  const wanted = params.metric || "";
  const groups = groupNames(app.metrics, wanted);
  const opened = new Set((params.open || "").split(",").filter(Boolean));
  const isOpen = (prefix) => prefix === "main" || wanted !== "" || opened.has(prefix);
  const toggle = (prefix) => {
    const next = new Set(opened);
    if (!next.delete(prefix)) next.add(prefix);
    setParams({ open: [...next].join(",") });
  };
  return html`<section class="page"><${RunTable} runs=${chosen} hidden=${hidden} />
    <div class="bar"><${Filter} name="metric" label="metric " value=${params.metric} isMain=${true} width=${180} placeholder="part of a name" />
      <label class="filter">smoothing <input type="range" min="0" max="0.98" step="0.02" value=${look.weight}
        onInput=${(event) => setParams({ smooth: event.target.value === "0" ? "" : event.target.value })} /> ${look.weight.toFixed(2)}</label>
      <${Choice} name="x" label="over " value=${params.x} options=${[["", "steps"], ["time", "time"]]} /><${Choice} name="y" label="scale " value=${params.y} options=${[["", "linear"], ["log", "logarithmic"]]} />
      <${Filter} name="runs" label="runs " value=${params.runs} width=${150} placeholder="name, tag or note" /></div>
    ${groups.length === 0 && html`<${Note}>No metric has this in its name.<//>`}
    ${groups.map(([prefix, names]) => html`<div key=${prefix} class="metrics">
      ${prefix !== "main" && html`<h2><button class="fold" aria-expanded=${isOpen(prefix)} onClick=${() => toggle(prefix)}>
        ${isOpen(prefix) ? "▾" : "▸"} ${prefix} <span class="dim">${names.length}</span></button></h2>`}
      ${isOpen(prefix) && html`<div class="charts">${names.map((name) => html`<${Chart} key=${name} name=${name}
        runs=${app.runs} hidden=${left} look=${look} version=${app.version} theme=${app.theme} />`)}</div>`}</div>`)}</section>`;
}
