// Rollouts of a run that match filters; the search goes on page by page while the page is open.
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { fetchAnswer, report } from "./api.js";
import { num } from "./format.js";
import { Advantage, Choice, Failed, Filter, Note, Reward, Table } from "./parts.js";
import { link } from "./route.js";
import { countTools } from "./steps.js";

const FILTERS = ["text", "task", "tool", "status", "cause", "min_reward", "max_reward", "min_tokens", "max_tokens", "min_turns", "max_turns", "first_step", "last_step", "sort"];
const SORTED = ["newest", "highest reward", "lowest reward", "longest", "shortest", "largest advantage", "smallest advantage"];
const ENOUGH = 100;

// Matches so far; asks for more until `wanted` are found or everything has been searched.
function useSearch(id, filters, wanted) {
  const key = JSON.stringify([id, filters]);
  const [state, setState] = useState({ key, matches: [], cursor: 0, error: null });
  const current = state.key === key ? state : { key, matches: [], cursor: 0, error: null };
  const isBusy = current.cursor !== null && current.error === null && current.matches.length < wanted;
  useEffect(() => {
    if (!isBusy) return undefined;
    const abort = new AbortController();
    fetchAnswer(`search/${id}`, { ...filters, cursor: current.cursor || "" }, abort.signal).then(
      (data) => setState({ ...data, key, matches: [...current.matches, ...data.matches], error: null, round: (current.round || 0) + 1 }),
      (error) => error.name !== "AbortError" && setState({ ...current, error: error.message }),
    );
    return () => abort.abort();
  }, [key, current.cursor, current.round, isBusy]);
  return { ...current, isBusy };
}

export function Search({ app, args, params }) {
  const id = Number(args[0] || 0);
  const run = app.runs[id];
  const filters = Object.fromEntries(FILTERS.map((name) => [name, params[name] || ""]));
  const [more, setMore] = useState({ key: "", wanted: ENOUGH });
  const key = JSON.stringify([id, filters]);
  const wanted = more.key === key ? more.wanted : ENOUGH;
  const found = useSearch(id, filters, report ? -1 : wanted);
  if (report) return html`<${Note}>A report cannot search; open the run with: tunesmith view<//>`;
  if (!run) return html`<${Note}>There is no such run.<//>`;
  const share = found.indexed_share !== undefined && found.indexed_share < 1 ? found.indexed_share : found.searched_share;
  return html`<section class="page"><div class="bar filters">
      <${Filter} name="text" label="text " value=${params.text} isMain=${true} width=${190} placeholder="in task, replies, errors" />
      <${Filter} name="task" label="task id " value=${params.task} width=${90} />
      <${Filter} name="tool" label="tool " value=${params.tool} width=${80} placeholder="name, * or -" />
      <${Choice} name="status" label="status " value=${params.status} options=${[["", "all"], ["scored", "scored"], ["failed", "failed"], ["trained", "trained"], ["untrained", "not trained"]]} />
      ${[["reward", "min_reward", "max_reward"], ["tokens", "min_tokens", "max_tokens"], ["turns", "min_turns", "max_turns"], ["step", "first_step", "last_step"]].map(([label, low, high]) => html`
        <span key=${label} class="range"><${Filter} name=${low} label=${`${label} `} type="number" width=${58} value=${params[low]} placeholder="min" />
        <${Filter} name=${high} label="to " type="number" width=${58} value=${params[high]} placeholder="max" /></span>`)}
      <${Choice} name="sort" label="sort " value=${params.sort} options=${SORTED.map((name) => [name === "newest" ? "" : name, name])} />
      <a href=${link("search", [id])}>clear</a></div>
    ${found.error ? html`<${Failed} message=${found.error} />` : html`<p class="summary">${found.matches.length} shown${
      found.num_candidates !== undefined && found.num_candidates !== null ? ` of ${found.cursor === null ? found.matches.length : `at most ${found.num_candidates}`} that match` : ""}<span>${num(found.num_rollouts ?? 0)} rollouts in the run</span> ${found.isBusy ? html`<progress aria-label="searched" value=${share ?? 0}></progress>` : ""}</p>`}
    <${Table} rows=${found.matches} keyOf=${(each) => `${each.step}/${each.group}/${each.run}`} columns=${[
      ["step", "r", (each) => html`<a href=${link("rollout", [id, each.step, each.group, each.run])}>${each.step}.${each.group}.${each.run}</a>`],
      ["reward", "", (each) => html`<${Reward} value=${each.reward} />`], ["advantage", "", (each) => html`<${Advantage} value=${each.advantage} />`],
      ["turns", "r", (each) => each.num_turns], ["tokens", "r", (each) => each.num_tokens], ["tools", "clip tools", (each) => countTools(each.tools)],
      ["task", "main half", (each) => html`${each.title} <span class="dim">${each.task_id}</span>`],
      ["response", "main half", (each) => html`${each.failure ? html`<span class="error">${each.failure}</span>` : each.response}${each.snippet && html`<div class="dim">…${each.snippet}…</div>`}`],
    ]} />
    ${found.cursor !== null && !found.isBusy && !found.error && html`<button class="more" onClick=${() => setMore({ key, wanted: found.matches.length + ENOUGH })}>show more</button>`}
    ${found.cursor === null && found.matches.length === 0 && html`<${Note}>No rollout matches.<//>`}</section>`;
}
