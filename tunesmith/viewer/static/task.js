// The same task over the steps of a run, and the difference of two of its rollouts.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { num, plural, rewardColor } from "./format.js";
import { Advantage, Fields, findRange, Loaded, Note, Reward } from "./parts.js";
import { link, setParams } from "./route.js";

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
    <table class="list"><thead><tr><th>task</th><th class="r">times</th><th>mean reward, in order of steps</th><th class="r">first</th><th class="r">last</th></tr></thead>
    <tbody>${data.tasks.map((task) => html`<tr key=${task.task_id} data-row tabindex="-1"><td><a href=${link("task", [id], { id: task.task_id })}>${task.task_id}</a></td>
      <td class="r">${task.steps.length}</td><td><span class="strip" style=${{ gridTemplateColumns: `repeat(${Math.min(task.means.length, 60)}, 10px)` }}>${task.means.slice(-60).map((mean, index) => html`<i key=${index}
        class=${mean === null ? "failed" : ""} title=${`step ${task.steps.slice(-60)[index]}: ${num(mean)}`} style=${{ background: rewardColor(mean, low, high) || "" }}></i>`)}</span></td>
      <td class="r">${num(task.means[0])}</td><td class="r">${num(task.means[task.means.length - 1])}</td></tr>`)}</tbody></table>`;
}

function Steps({ id, data, params }) {
  const scale = Math.max(1e-9, ...data.groups.flatMap((group) => group.rollouts.map((each) => Math.abs(each.advantage ?? 0))));
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
    <table class="list"><thead><tr><th></th><th class="r">step</th><th class="r">rollout</th><th>reward</th><th>advantage</th><th class="r">tokens</th><th>response</th></tr></thead>
    <tbody>${data.groups.flatMap((group) => group.rollouts.map((each, index) => {
      const key = `${id}/${group.step}/${group.group}/${each.run}`;
      return html`<tr key=${key} data-row tabindex="-1" class=${index === 0 ? "first" : ""}>
        <td><input type="checkbox" aria-label=${`compare step ${group.step} rollout ${each.run}`} checked=${isChosen(key)} onChange=${() => choose(key)} /></td>
        <td class="r">${index === 0 ? html`<a href=${link("group", [id, group.step, group.group])}>${group.step}</a>` : ""}</td>
        <td class="r"><a href=${link("rollout", [id, group.step, group.group, each.run])}>${each.run}</a></td><td><${Reward} value=${each.reward} /></td>
        <td><${Advantage} value=${each.advantage} scale=${scale} /></td><td class="r">${each.num_tokens}</td>
        <td class="main">${each.failure ? html`<span class="error">${each.failure}</span>` : each.response}</td></tr>`;
    }))}</tbody></table>`;
}

function Difference({ before, after }) {
  const answer = useAnswer("diff", { before, after });
  const title = (each) => html`step ${each.step} rollout ${each.rollout}, reward ${num(each.reward)}`;
  return html`<div class="difference"><${Loaded} answer=${answer}>${(data) => html`<header><del>${title(data.before)}</del> <ins>${title(data.after)}</ins></header>
    <div class="text">${data.parts.map((part, index) => (part.kind === "=" ? html`<span key=${index}>${part.text}</span>`
      : part.kind === "-" ? html`<del key=${index}>${part.text}</del>` : html`<ins key=${index}>${part.text}</ins>`))}</div>`}<//></div>`;
}
