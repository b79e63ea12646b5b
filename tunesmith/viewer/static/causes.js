// Failures by cause, and what the selector chose.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { listSteps, num, plural } from "./format.js";
import { Loaded, Note } from "./parts.js";
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
      <${Histogram} bars=${cause.steps} last=${run.last_step} />
      <div class="links"><a href=${link("rollout", [id, cause.example.step, cause.example.group, cause.example.run])}>newest, step ${cause.example.step}</a>
        <span class="dim">${cause.task_id}</span> <span class="dim">first in step ${cause.first_step}</span></div>
      <div class="text">${cause.message}</div>${cause.traceback && html`<details open=${data.causes.length <= 4}><summary>traceback</summary><pre>${cause.traceback}</pre></details>`}</article>`)}`}<//></section>`;
}

// Counts over steps, in at most 120 bars.
function Histogram({ bars, last }) {
  const size = Math.max(1, Math.ceil((last + 1) / 120));
  const counts = new Array(Math.ceil((last + 1) / size)).fill(0);
  for (const [step, count] of bars) counts[Math.min(Math.floor(step / size), counts.length - 1)] += count;
  const top = Math.max(...counts, 1);
  return html`<div class="histogram" aria-hidden="true">${counts.map((count, index) => html`<i key=${index} title=${`step ${index * size}: ${count}`}
    style=${{ height: `${Math.round((24 * count) / top)}px` }}></i>`)}</div>`;
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
      <figure><figcaption>expected pass rates of all tasks</figcaption><div class="histogram tall">${data.histogram.map((count, index) => html`<i key=${index}
        title=${`${index / data.histogram.length} to ${(index + 1) / data.histogram.length}: ${count} tasks`}
        style=${{ height: `${Math.round((80 * count) / Math.max(...data.histogram, 1))}px` }}></i>`)}</div><div class="ends"><span>0</span><span>1</span></div></figure>
      <dl class="fields">${Object.entries(data.summary).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${num(value)}</dd>`)}</dl></div>
    <table class="list"><thead><tr><th>task</th><th>why</th><th class="r">expected</th><th class="r">times chosen</th><th class="r">mean reward</th></tr></thead>
      <tbody>${data.choices.map((choice, index) => html`<tr key=${index} data-row tabindex="-1"><td class="main half">${
        choice.group === null ? choice.task_id : html`<a href=${link("group", [run.id, step, choice.group])}>${choice.title || choice.task_id}</a> <span class="dim">${choice.task_id}</span>`}</td>
        <td class="main half" title=${JSON.stringify(choice.numbers)}>${choice.reason}</td><td class="r">${num(choice.numbers.expected_pass_rate)}</td>
        <td class="r">${num(choice.numbers.num_selected)}</td><td class="r">${num(choice.mean)}</td></tr>`)}</tbody></table>`}<//></section>`;
}
