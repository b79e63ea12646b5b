// The same task over the steps of a run, and the difference of two of its rollouts.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { num, plural } from "./format.js";
import { Advantage, Fields, findRange, Loaded, Note, Reward, Rewards, Table } from "./parts.js";
import { link, setParams } from "./route.js";

const NUM_SHOWN = 60;

export function Task({ app, args, params }) {
  const id = Number(args[0] || 0);
  const run = app.runs[id];
  const list = useAnswer(run && !params.id ? `tasks/${id}` : null, {}, app.version);
  const task = useAnswer(run && params.id ? `task/${id}` : null, { id: params.id }, app.version);
  if (!run) return html`<${Note}>There is no such run.<//>`;
  return html`<section class="page">${params.id
    ? html`<${Loaded} answer=${task}>${(data) => html`<${Steps} id=${id} data=${data} params=${params} />`}<//>`
    : html`<${Loaded} answer=${list}>${(data) => html`<${Tasks} id=${id} data=${data} />`}<//>`}</section>`;
}

function Tasks({ id, data }) {
  const [low, high] = findRange(data.tasks.flatMap((task) => task.means));
  return html`<p class="summary">${plural(data.num_tasks, "task")} tried, those of most steps first</p>
    <${Table} rows=${data.tasks} keyOf=${(task) => task.task_id} columns=${[
      ["task", "main", (task) => html`<a href=${link("task", [id], { id: task.task_id })}>${task.title || task.task_id}</a> <span class="dim">${task.task_id}</span>`],
      ["times", "r", (task) => task.steps.length],
      ["mean reward, in order of steps", "", (task) => html`<${Rewards} rewards=${task.means.slice(-NUM_SHOWN)} low=${low} high=${high} names=${task.steps.slice(-NUM_SHOWN).map((step) => `step ${step}`)} />`],
      ["first", "r", (task) => num(task.means[0])], ["last", "r", (task) => num(task.means[task.means.length - 1])],
    ]} />`;
}

function Steps({ id, data, params }) {
  const scale = Math.max(1e-9, ...data.groups.flatMap((group) => group.rollouts.map((each) => Math.abs(each.advantage ?? 0))));
  const rows = data.groups.flatMap(({ step, group, rollouts }) => rollouts.map((each, index) => ({ ...each, step, group, isFirst: index === 0, key: `${id}/${step}/${group}/${each.run}` })));
  const isChosen = (key) => params.before === key || params.after === key;
  const choose = (key) => {
    if (params.before === key) setParams({ before: params.after || "", after: "" });
    else if (params.after === key) setParams({ after: "" });
    else setParams(params.before ? { after: key } : { before: key });
  };
  return html`<div class="bar"><a data-key="u" href=${link("task", [id])}>all tasks</a><b>${data.task_id}</b>
      <span class="dim">choose two rollouts to compare them</span></div>
    <details class="task" open><summary>${data.task_id}</summary><${Fields} row=${data.row} /></details>
    ${params.before && params.after && html`<${Difference} before=${params.before} after=${params.after} />`}
    ${data.num_groups > data.groups.length && html`<p class="summary">the newest ${data.groups.length} of ${data.num_groups} groups</p>`}
    <${Table} rows=${rows} keyOf=${(each) => each.key} rowClass=${(each) => (each.isFirst ? "first" : "")} columns=${[
      ["compare", "", (each) => html`<input type="checkbox" aria-label=${`compare step ${each.step} rollout ${each.run}`} checked=${isChosen(each.key)} onChange=${() => choose(each.key)} />`],
      ["step", "r", (each) => (each.isFirst ? html`<a href=${link("group", [id, each.step, each.group])}>${each.step}</a>` : "")],
      ["rollout", "r", (each) => html`<a href=${link("rollout", [id, each.step, each.group, each.run])}>${each.run}</a>`],
      ["reward", "", (each) => html`<${Reward} value=${each.reward} />`], ["advantage", "", (each) => html`<${Advantage} value=${each.advantage} scale=${scale} />`],
      ["tokens", "r", (each) => each.num_tokens], ["response", "main", (each) => (each.failure ? html`<span class="error">${each.failure}</span>` : each.response)],
    ]} />`;
}

function Difference({ before, after }) {
  const answer = useAnswer("diff", { before, after });
  const title = (each) => html`step ${each.step} rollout ${each.rollout}, reward ${num(each.reward)}`;
  return html`<div class="difference"><${Loaded} answer=${answer}>${(data) => html`<header><del>${title(data.before)}</del> <ins>${title(data.after)}</ins></header>
    <div class="text">${data.parts.map((part, index) => (part.kind === "=" ? html`<span key=${index}>${part.text}</span>`
      : part.kind === "-" ? html`<del key=${index}>${part.text}</del>` : html`<ins key=${index}>${part.text}</ins>`))}</div>`}<//></div>`;
}
