// Reward and metric curves of runs side by side.
import { html } from "./vendor/htm-preact.js";
import { Chart } from "./chart.js";
import { num, runColor } from "./format.js";
import { Filter, Note } from "./parts.js";
import { link, setParams } from "./route.js";

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
  return html`<table class="runs"><thead><tr><th></th><th>run</th><th>state</th><th class="r">steps</th><th class="r">reward</th>
    <th>algorithm</th><th>model</th></tr></thead><tbody>${runs.map((run) => html`<tr key=${run.id} data-row>
    <td><input type="checkbox" aria-label=${`show ${run.name}`} checked=${!hidden.has(run.id)} onChange=${() => toggle(run.id)}
      style=${{ accentColor: runColor(run.id) }} /></td>
    <td><a href=${run.steps.length ? link("step", [run.id, "latest"]) : link("config", [run.id])} title=${run.path}>
      <i class="swatch" style=${{ background: runColor(run.id) }}></i>${run.name}</a></td>
    <td><span class="state ${run.state}" title=${run.stop_reason || (run.error && run.error.message) || ""}>${run.state}</span></td>
    <td class="r">${run.last_step}${run.total_steps ? html`<span class="dim"> / ${run.total_steps}</span>` : ""}</td>
    <td class="r">${run.reward.length ? num(run.reward[0]) : "–"}</td>
    <td>${run.algorithm || ""}</td><td class="clip" title=${run.model || ""}>${(run.model || "").split("/").slice(-2).join("/")}</td></tr>`)}</tbody></table>`;
}

export function Curves({ app, params }) {
  const hidden = new Set((params.hide || "").split(",").filter(Boolean).map(Number));
  const weight = Number(params.smooth || 0);
  const wanted = params.metric || "";
  const groups = groupNames(app.metrics, wanted);
  const opened = new Set((params.open || "").split(",").filter(Boolean));
  const isOpen = (prefix) => prefix === "main" || wanted !== "" || opened.has(prefix);
  const toggle = (prefix) => {
    const next = new Set(opened);
    if (!next.delete(prefix)) next.add(prefix);
    setParams({ open: [...next].join(",") });
  };
  return html`<section class="page"><${RunTable} runs=${app.runs} hidden=${hidden} />
    <div class="bar"><${Filter} name="metric" label="metric " value=${params.metric} isMain=${true} width=${180} placeholder="part of a name" />
      <label class="filter">smoothing <input type="range" min="0" max="0.98" step="0.02" value=${weight}
        onInput=${(event) => setParams({ smooth: event.target.value === "0" ? "" : event.target.value })} /> ${weight.toFixed(2)}</label></div>
    ${groups.length === 0 && html`<${Note}>No metric has this in its name.<//>`}
    ${groups.map(([prefix, names]) => html`<div key=${prefix} class="metrics">
      ${prefix !== "main" && html`<h2><button class="fold" aria-expanded=${isOpen(prefix)} onClick=${() => toggle(prefix)}>
        ${isOpen(prefix) ? "▾" : "▸"} ${prefix} <span class="dim">${names.length}</span></button></h2>`}
      ${isOpen(prefix) && html`<div class="charts">${names.map((name) => html`<${Chart} key=${name} name=${name}
        runs=${app.runs} hidden=${hidden} weight=${weight} version=${app.version} theme=${app.theme} />`)}</div>`}</div>`)}</section>`;
}
