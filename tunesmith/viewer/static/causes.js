// Failures by cause, and what the selector chose.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { listSteps, num, plural } from "./format.js";
import { Bars, Loaded, Note, Table } from "./parts.js";
import { link } from "./route.js";
import { StepPicker } from "./steps.js";

export function Failures({ app, args }) {
  const id = Number(args[0] || 0);
  const run = app.runs[id];
  const answer = useAnswer(run ? `failures/${id}` : null, {}, app.version);
  if (!run) return html`<${Note}>There is no such run.<//>`;
  return html`<section class="page">${run.error && html`<div class="failure"><b>the run stopped</b> ${run.error.message || JSON.stringify(run.error)}</div>`}
    <${Loaded} answer=${answer}>${(data) => html`
    <p class="summary">${data.num_failures} of ${plural(data.num_rollouts, "rollout")} failed, ${plural(data.num_causes, "cause")}</p>
    ${data.causes.map((cause, index) => html`<article key=${index} class="cause" data-row tabindex="-1">
      <header><b class="count">${cause.count}</b> <b>${cause.where}</b> <span class="error">${cause.error}</span> <span class="dim">${cause.line}</span></header>
      <${Bars} ...${countSteps(cause.steps, run.last_step)} />
      <div class="links"><a href=${link("rollout", [id, cause.example.step, cause.example.group, cause.example.run])}>newest, step ${cause.example.step}</a>
        <span class="dim">${cause.task_id}</span> <span class="dim">first in step ${cause.steps[0][0]}</span></div>
      <div class="text">${cause.message}</div>${cause.traceback && html`<details open=${data.causes.length <= 4}><summary>traceback</summary><pre>${cause.traceback}</pre></details>`}</article>`)}`}<//></section>`;
}

// Counts over steps, in at most 120 bars.
function countSteps(bars, last) {
  const size = Math.max(1, Math.ceil((last + 1) / 120));
  const counts = new Array(Math.ceil((last + 1) / size)).fill(0);
  for (const [step, count] of bars) counts[Math.min(Math.floor(step / size), counts.length - 1)] += count;
  return { counts, titles: counts.map((count, index) => `step ${index * size}: ${count}`) };
}

export function Selector({ app, args }) {
  const run = app.runs[Number(args[0] || 0)];
  const steps = run ? listSteps(run.steps) : [];
  const step = args[1] === undefined || args[1] === "latest" ? steps[steps.length - 1] : Number(args[1]);
  const answer = useAnswer(run && run.has_selection && steps.length ? `selection/${run.id}/${step}` : null);
  if (!run || !run.has_selection) {
    return html`<${Note}>This run's selector does not explain its choices: only selectors with a method explain, such as difficulty_based (BOTS), are recorded.<//>`;
  }
  return html`<section class="page"><div class="bar"><${StepPicker} run=${run} step=${step} page="selector" /></div>
    <${Loaded} answer=${answer}>${(data) => html`<div class="selector">
      <figure class="distribution"><figcaption>expected pass rates of all tasks</figcaption><${Bars} className="tall" height=${80} counts=${data.histogram}
        titles=${data.histogram.map((count, index) => `${index / data.histogram.length} to ${(index + 1) / data.histogram.length}: ${count} tasks`)} />
        <div class="ends"><span>0</span><span>1</span></div></figure>
      <dl class="fields">${Object.entries(data.summary).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${num(value)}</dd>`)}</dl></div>
    <${Table} rows=${data.choices} columns=${[
      ["task", "main half", (each) => (each.group === null ? each.task_id
        : html`<a href=${link("group", [run.id, step, each.group])}>${each.title || each.task_id}</a> <span class="dim">${each.task_id}</span>`)],
      ["why", "main half", (each) => html`<span title=${JSON.stringify(each.numbers)}>${each.reason}</span>`],
      ["expected", "r", (each) => num(each.numbers.expected_pass_rate)], ["times chosen", "r", (each) => num(each.numbers.num_selected)], ["mean reward", "r", (each) => num(each.mean)],
    ]} />`}<//></section>`;
}
