// Evaluation questions with the answers of models next to each other.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { num, rewardColor, runColor } from "./format.js";
import { Choice, Fields, Filter, Loaded, LongText, Note, Table } from "./parts.js";
import { setParams } from "./route.js";

export function Evaluations({ app, params }) {
  const answer = useAnswer("evaluations", {}, app.version);
  return html`<section class="page"><${Loaded} answer=${answer}>${({ sets }) => {
    const names = Object.keys(sets);
    if (!names.length) return html`<${Note}>No run has been evaluated. Evaluations come from eval_datasets of a run file, or from tunesmith eval --out.<//>`;
    const name = names.includes(params.set) ? params.set : names[0];
    return html`<${EvaluationSet} name=${name} names=${names} columns=${sets[name]} params=${params} version=${app.version} />`;
  }}<//></section>`;
}

function EvaluationSet({ name, names, columns, params, version }) {
  const known = new Map(columns.map((column) => [column.key, column]));
  const asked = (params.columns || "").split(",").filter((key) => known.has(key));
  const chosen = asked.length ? asked : columns.filter((column) => column.is_first_shown).map((column) => column.key);
  const toggle = (key) => setParams({ columns: columns.map((each) => each.key).filter((each) => (each === key) !== chosen.includes(each)).join(","), page: "" });
  const answer = useAnswer("answers", { set: name, columns: chosen.join(","), text: params.text, show: params.show, page: params.page }, version);
  return html`<div class="bar">${names.length > 1 && html`<${Choice} name="set" label="set " value=${name} options=${names.map((each) => [each, each])} />`}
      <${Filter} name="text" label="text " value=${params.text} isMain=${true} width=${170} placeholder="in questions and answers" />
      <${Choice} name="show" label="show " value=${params.show} options=${[["", "all questions"], ["differ", "where rewards differ"], ["wrong", "not solved by the last"]]} /></div>
    <div class="columns">${columns.map((column) => html`<label key=${column.key} class=${chosen.includes(column.key) ? "on" : ""}>
      <input type="checkbox" checked=${chosen.includes(column.key)} onChange=${() => toggle(column.key)} style=${{ accentColor: runColor(column.run) }} />
      ${column.label} <b>${num(column.mean)}</b> <span class="dim">${column.low === null ? "" : `${num(column.low)} to ${num(column.high)}`}</span></label>`)}</div>
    <${Loaded} answer=${answer}>${(data) => html`<${Answers} data=${data} columns=${chosen.map((key) => known.get(key))} params=${params} />`}<//>`;
}

function Answers({ data, columns, params }) {
  const page = Number(params.page || 0);
  const pages = Math.ceil(data.num_rows / data.page_rows);
  return html`<p class="summary">${data.num_rows} of ${data.num_tasks} questions ${pages > 1 ? html`
      <button data-key="[" disabled=${page === 0} onClick=${() => setParams({ page: page - 1 || "" })}>◂</button> page ${page + 1} of ${pages}
      <button data-key="]" disabled=${page + 1 >= pages} onClick=${() => setParams({ page: page + 1 })}>▸</button>` : ""}</p>
    <${Table} className="list answers" rows=${data.rows} columns=${[["question", "", (row) => (Object.keys(row.row).length
      ? html`<details><summary>${row.title} <span class="dim">${row.task_id}</span></summary><${Fields} row=${row.row} /></details>` : row.task_id)],
      ...columns.map((column, index) => [column.label, "", (row) => (row.cells[index] ? html`<${Cell} cell=${row.cells[index]} />` : html`<span class="dim">–</span>`)])]} />`;
}

function Cell({ cell }) {
  return html`<div class="answer"><span class="score" style=${{ borderColor: rewardColor(cell.mean, 0, 1) || "" }}>${num(cell.mean)}</span>
    <div>${cell.answers.map((text, index) => html`<${LongText} key=${index} text=${text || "(empty)"} />`)}
    ${cell.failures.map((text, index) => html`<div key=${index} class="error">${text}</div>`)}</div></div>`;
}
