// The page: navigation, the chosen run, and following runs that are still going.
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { fetchAnswer, report } from "./api.js";
import { Failures, Selector } from "./causes.js";
import { Curves } from "./curves.js";
import { Evaluations } from "./evaluations.js";
import { Help, useKeys } from "./keys.js";
import { Failed, Note } from "./parts.js";
import { Rollout } from "./rollout.js";
import { go, link, useRoute } from "./route.js";
import { Run } from "./run.js";
import { Search } from "./search.js";
import { Group, Step } from "./steps.js";
import { Task } from "./task.js";

const PAGES = { curves: Curves, step: Step, group: Group, rollout: Rollout, search: Search, task: Task, failures: Failures, selector: Selector, evaluations: Evaluations, run: Run, config: Run };
const TABS = [["curves", "Curves"], ["run", "Run"], ["step", "Rollouts"], ["search", "Search"], ["task", "Tasks"], ["failures", "Failures"], ["selector", "Selector"],
  ["evaluations", "Evaluations"]];
const TAB_OF = { group: "step", rollout: "step", config: "run" };
const WITHOUT_RUN = new Set(["curves", "evaluations"]);
const FAST_MS = 2000;
const SLOW_MS = 10000;

// A report that is opened as a file may have no storage.
function readSavedTheme() {
  try {
    return localStorage.getItem("tunesmith-theme");
  } catch {
    return null;
  }
}

function saveTheme(theme) {
  try {
    localStorage.setItem("tunesmith-theme", theme);
  } catch {
    // it lasts until the page is closed
  }
}

function useTheme() {
  const [theme, setTheme] = useState(() => readSavedTheme() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  const toggle = () => {
    const next = (document.documentElement.dataset.theme || theme) === "dark" ? "light" : "dark"; // also for two keys at once
    saveTheme(next);
    document.documentElement.dataset.theme = next;
    setTheme(next);
  };
  return [theme, toggle];
}

// The runs, described again whenever their files change; `reload` asks at once.
function useRuns() {
  const [state, setState] = useState({ data: null, error: null, version: 0, isLost: false });
  const reload = useRef(() => {});
  useEffect(() => {
    let versions = null;
    let timer = null;
    let isEnded = false;
    let last = 0;
    const load = async () => {
      let wait = SLOW_MS;
      const number = (last += 1);
      try {
        if (!document.hidden || versions === null) {
          const now = report ? { versions: [], is_running: false } : await fetchAnswer("versions");
          const text = JSON.stringify(now.versions);
          wait = now.is_running ? FAST_MS : SLOW_MS;
          if (text !== versions) {
            const data = await fetchAnswer("runs");
            versions = text;
            if (!isEnded) setState((old) => ({ data, error: null, version: old.version + 1, isLost: false }));
          } else if (!isEnded) setState((old) => (old.isLost ? { ...old, isLost: false } : old));
        }
      } catch (error) {
        if (!isEnded) setState((old) => ({ ...old, error: old.data ? null : error.message, isLost: true }));
      }
      if (!isEnded && !report && number === last) timer = setTimeout(load, wait);
    };
    load();
    reload.current = () => { clearTimeout(timer); load(); };
    return () => { isEnded = true; clearTimeout(timer); };
  }, []);
  return { ...state, reload: reload.current };
}

function App() {
  const route = useRoute();
  const [theme, toggleTheme] = useTheme();
  const [isHelpOpen, setHelp] = useState(false);
  const { data, error, version, isLost, reload } = useRuns();
  const firstWithRollouts = data ? Math.max(data.runs.findIndex((run) => run.steps.length), 0) : 0;
  const [lastRun, setLastRun] = useState(null);
  const isOfRun = !WITHOUT_RUN.has(route.page) && route.args[0] !== undefined;
  const run = isOfRun ? Number(route.args[0]) : lastRun ?? firstWithRollouts;
  useEffect(() => isOfRun && setLastRun(run), [run, isOfRun]);
  useEffect(() => scrollTo(0, 0), [route.page, route.args.join("/")]);
  const pages = TABS.map(([page]) => link(page, WITHOUT_RUN.has(page) ? [] : [run]));
  const choose = (id) => go(TAB_OF[route.page] || route.page, WITHOUT_RUN.has(route.page) ? [] : [id], {});
  const nextRun = () => data && choose((run + 1) % data.runs.length);
  useKeys({ setHelp, pages, nextRun, toggleTheme });
  if (error) return html`<${Failed} message=${error} />`;
  if (!data) return html`<${Note}>Loading<//>`;
  const Page = PAGES[route.page];
  const tab = TAB_OF[route.page] || route.page;
  const app = { runs: data.runs, metrics: data.metrics, version, theme, reload };
  const args = WITHOUT_RUN.has(route.page) || route.args.length ? route.args : [String(run)];
  return html`<header class="top"><h1 class="brand"><a href="#/">tunesmith</a></h1>
      <nav>${TABS.map(([page, label], index) => html`<a key=${page} href=${pages[index]} class=${tab === page ? "on" : ""} aria-current=${tab === page ? "page" : undefined}>${label}</a>`)}</nav>
      ${!WITHOUT_RUN.has(route.page) && html`<label class="runpicker">run <select value=${String(run)} onChange=${(event) => choose(Number(event.target.value))}>
        ${data.runs.map((each) => html`<option key=${each.id} value=${String(each.id)} selected=${each.id === run}>${each.name}</option>`)}</select></label>`}
      <span class="right">${data.runs.some((each) => each.state === "running") && html`<span class="live">● live</span>`}
        ${isLost && html`<span class="error">the server does not answer</span>`}
        ${report && html`<span class="dim" title=${report.left_out.join("\n")}>report of ${report.date}</span>`}
        <button onClick=${toggleTheme} title="dark or light (d)" aria-label="dark or light">◐</button><button onClick=${() => setHelp(true)} title="keys (?)" aria-label="keys">?</button></span></header>
    ${report && report.left_out.length > 0 && html`<details class="leftout"><summary>This report leaves out ${report.left_out.length} kinds of content</summary>
      <ul>${report.left_out.map((text) => html`<li key=${text}>${text}</li>`)}</ul></details>`}
    <main>${Page ? html`<${Page} key=${route.page} app=${app} args=${args} params=${route.params} />` : html`<${Note}>There is no page ${route.page}.<//>`}</main>
    ${isHelpOpen && html`<${Help} close=${() => setHelp(false)} />`}`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
