// The groups of a step, and one group: its rollouts and their trie.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { listSteps, num, plural } from "./format.js";
import { Advantage, Bars, Choice, Fields, Filter, findRange, Loaded, Note, Reward, Rewards, Table, Tabs } from "./parts.js";
import { go, link } from "./route.js";
import { Trie } from "./trie.js";

const NUM_BARS = 24;
const SORTS = {
  order: () => 0, mean: (a, b) => (a.mean ?? -1e9) - (b.mean ?? -1e9), std: (a, b) => (b.std ?? -1) - (a.std ?? -1),
  failures: (a, b) => b.num_failures - a.num_failures,
  tokens: (a, b) => Math.max(...b.num_tokens) - Math.max(...a.num_tokens),
};

export function StepPicker({ run, step, page = "step" }) {
  const steps = listSteps(run.steps);
  const position = steps.indexOf(step);
  const move = (by) => position + by >= 0 && position + by < steps.length && go(page, [run.id, steps[position + by]]);
  return html`<span class="picker"><button data-key="[" title="previous step ([)" disabled=${position <= 0} onClick=${() => move(-1)}>◂</button>
    <label>step <input type="number" min=${steps[0]} max=${steps[steps.length - 1]} value=${step}
      onChange=${(event) => go(page, [run.id, event.target.value])} /></label>
    <span class="dim">of ${steps[steps.length - 1]}</span>
    <button data-key="]" title="next step (])" disabled=${position >= steps.length - 1} onClick=${() => move(1)}>▸</button></span>`;
}

export function Step({ app, args, params }) {
  const run = app.runs[Number(args[0])];
  const steps = run ? listSteps(run.steps) : [];
  const isLatest = args[1] === "latest" || args[1] === undefined;
  const step = isLatest ? steps[steps.length - 1] : Number(args[1]);
  const answer = useAnswer(run && steps.length ? `step/${run.id}/${step}` : null);
  if (!run || !steps.length) return html`<${Note}>This run has no rollouts.<//>`;
  return html`<section class="page"><div class="bar"><${StepPicker} run=${run} step=${step} />
    ${run.state === "running" && html`<a class=${`follow ${isLatest ? "on" : ""}`} href=${link("step", [run.id, isLatest ? step : "latest"])}>
      ${isLatest ? "● following" : "○ follow the newest"}</a>`}
    <${Filter} name="q" label="task " value=${params.q} isMain=${true} placeholder="text or id" width=${160} />
    <${Choice} name="sort" label="sort " value=${params.sort} options=${[["", "order"], ["mean", "lowest reward"], ["std", "largest spread"], ["failures", "most failures"], ["tokens", "longest"]]} />
    ${run.has_selection && html`<a href=${link("selector", [run.id, step])}>why these tasks</a>`}</div>
    <${Loaded} answer=${answer}>${(data) => html`<${Groups} run=${run} data=${data} params=${params} />`}<//></section>`;
}

function Groups({ run, data, params }) {
  const [low, high] = findRange(data.groups.flatMap((group) => group.rewards));
  const wanted = (params.q || "").toLowerCase();
  const groups = data.groups.filter((group) => `${group.task_id} ${group.title}`.toLowerCase().includes(wanted));
  if (params.sort) groups.sort(SORTS[params.sort] || SORTS.order);
  const rewards = listRewards(data);
  const step = listSteps(run.steps)[0];
  const { data: first } = useAnswer(step < data.step ? `step/${run.id}/${step}` : null);
  const failed = data.groups.reduce((sum, group) => sum + group.num_failures, 0);
  return html`<p class="summary">${plural(data.groups.length, "group")}, ${plural(rewards.length + failed, "rollout")}, mean reward
    ${" "}${num(rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null)}${failed ? html`, <b class="error">${failed} failed</b>` : ""}</p>
    <div class="distributions"><${Distribution} name="rewards" now=${rewards} then=${first && listRewards(first)} step=${step} />
      <${Distribution} name="sampled tokens" now=${listLengths(data)} then=${first && listLengths(first)} step=${step} /></div>
    <${Table} rows=${groups} keyOf=${(group) => group.group} columns=${[
      ["#", "r dim", (group) => group.group],
      ["task", "main", (group) => html`<a href=${link("group", [run.id, data.step, group.group])}>${group.title || group.task_id}</a> <span class="dim">${group.task_id}</span>`],
      ["rewards", "", (group) => html`<${Rewards} rewards=${group.rewards} low=${low} high=${high} />`], ["mean", "r", (group) => num(group.mean)], ["std", "r", (group) => num(group.std)],
      ["advantages", "", (group) => describeAdvantages(group.advantages.filter((value) => value !== null))],
      ["tokens", "r", (group) => num(Math.round(group.num_tokens.reduce((a, b) => a + b, 0) / group.num_tokens.length))],
    ]} />`;
}

function describeAdvantages(trained) {
  return trained.length ? `${num(Math.min(...trained), 2)} to ${num(Math.max(...trained), 2)}` : html`<span class="dim">not trained</span>`;
}

function listRewards(data) {
  return data.groups.flatMap((group) => group.rewards).filter((value) => value !== null);
}

function listLengths(data) {
  return data.groups.flatMap((group) => group.num_tokens);
}

// How often values occur now, and as outlines in the first step: one bar for each of a few integers, else for equal parts of the range.
function Distribution({ name, now, then, step }) {
  const all = [...now, ...(then || [])];
  if (!all.length) return null;
  const [low, high] = all.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  const isFew = high === low || (high - low < NUM_BARS && all.every(Number.isInteger));
  const [size, width] = isFew ? [Math.round(high - low) + 1, 1] : [NUM_BARS, (high - low) / NUM_BARS];
  const count = (each) => each.reduce((counts, value) => { counts[Math.min(Math.floor((value - low) / width), size - 1)] += 1; return counts; }, new Array(size).fill(0));
  const counts = count(now);
  const titles = counts.map((number, index) => `${num(low + index * width)}${isFew ? "" : ` to ${num(low + (index + 1) * width)}`}: ${plural(number, "rollout")}`);
  // outlines are scaled to the number of rollouts now
  const others = then && then.length ? count(then).map((number) => (number * now.length) / then.length) : null;
  return html`<figure class="distribution" data-name=${name}><figcaption>${name}${others ? html` <span class="dim">outline: step ${step}</span>` : ""}</figcaption>
    <${Bars} className="tall" height=${56} counts=${counts} titles=${titles} others=${others} /><div class="ends"><span>${num(low)}</span>${high > low && html`<span>${num(high)}</span>`}</div></figure>`;
}

export function Group({ app, args, params }) {
  const [id, step, number] = args.map(Number);
  const run = app.runs[id];
  const tab = params.view || "rollouts";
  const answer = useAnswer(run ? `group/${id}/${step}/${number}` : null);
  if (!run) return html`<${Note}>There is no such run.<//>`;
  return html`<section class="page"><${Loaded} answer=${answer}>${(data) => html`
    <div class="bar"><${Tabs} name="view" value=${tab} options=${[["rollouts", "rollouts"], ["trie", "trie"]]} />
      <a data-key="u" href=${link("step", [id, step])}>step ${step}</a>
      <a href=${link("task", [id], { id: data.task_id })}>this task in other steps</a>
      <button data-key="[" disabled=${number === 0} onClick=${() => go("group", [id, step, number - 1], params)}>◂ group</button>
      <button data-key="]" disabled=${number + 1 >= data.num_groups} onClick=${() => go("group", [id, step, number + 1], params)}>group ▸</button></div>
    <details class="task" open><summary>${data.task_id}</summary><${Fields} row=${data.row} /></details>
    ${data.baseline_reward !== null && html`<p class="summary">baseline: greedy rollout with reward ${num(data.baseline_reward)}</p>`}
    ${tab === "trie" ? html`<${Trie} id=${id} step=${step} group=${number} rollouts=${data.rollouts} />`
      : html`<${Rollouts} id=${id} data=${data} />`}`}<//></section>`;
}

function Rollouts({ id, data }) {
  const scale = Math.max(1e-9, ...data.rollouts.map((each) => Math.abs(each.advantage ?? 0)));
  return html`<${Table} rows=${data.rollouts} keyOf=${(each) => each.run} columns=${[
    ["#", "r", (each) => html`<a href=${link("rollout", [id, data.step, data.group, each.run])}>${each.run}</a>`],
    ["reward", "", (each) => html`<${Reward} value=${each.reward} />`], ["advantage", "", (each) => html`<${Advantage} value=${each.advantage} scale=${scale} />`],
    ["turns", "r", (each) => each.num_turns], ["tokens", "r", (each) => each.num_tokens],
    ["ended by", "dim", (each) => each.stop_reasons[each.stop_reasons.length - 1] || ""], ["tools", "clip tools", (each) => countTools(each.tools)],
    ["response", "main", (each) => (each.failure ? html`<span class="error">${each.failure}</span>` : each.response)],
  ]} />`;
}

export function countTools(tools) {
  const counts = new Map();
  for (const tool of tools) counts.set(tool, (counts.get(tool) || 0) + 1);
  return [...counts].map(([name, count]) => (count > 1 ? `${name} ×${count}` : name)).join(", ");
}
