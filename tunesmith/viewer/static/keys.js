// The keyboard: pages, rows, and whatever on the page has `data-key`.
import { html, useEffect } from "./vendor/htm-preact.js";

export const KEYS = [["1 – 8", "pages, from left to right"], ["j, k", "next and previous row"], ["Enter", "open the row"], ["u", "up: rollout, group, step"],
  ["[ , ]", "previous and next step, group, rollout or page"], ["t", "conversation or tokens"], ["c", "next coloring of tokens"], ["x", "check the row"],
  ["/", "first filter"], ["Esc", "leave a filter, close this"], ["r", "next run"], ["d", "dark or light"], ["?", "these keys"]];

function moveRow(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement.closest("[data-row]"));
  const row = rows[Math.min(Math.max(at + by, 0), rows.length - 1)];
  row.focus();
  row.scrollIntoView({ block: "nearest" });
}

export function useKeys({ setHelp, pages, nextRun, toggleTheme }) {
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && !/checkbox|range/.test(event.target.type);
      if (event.key === "Escape") {
        setHelp(false);
        event.target.blur();
        return;
      }
      if (isTyping) return;
      const row = document.activeElement.closest("[data-row]");
      const actions = {
        "?": () => setHelp((isOpen) => !isOpen), d: toggleTheme, r: nextRun, j: () => moveRow(1), k: () => moveRow(-1),
        "/": () => document.querySelector("[data-main]")?.focus(), Enter: () => row === event.target && row.querySelector("a")?.click(),
        x: () => row?.querySelector("input[type=checkbox]")?.click(),
      };
      const action = actions[event.key] || (pages[Number(event.key) - 1] && (() => { location.hash = pages[Number(event.key) - 1]; }));
      const target = [...document.querySelectorAll("[data-key]")].find((each) => each.dataset.key === event.key);
      if (!action && !target) return;
      if (event.key !== "Enter") event.preventDefault();
      (action || (() => target.click()))();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
}

export function Help({ close }) {
  return html`<div class="overlay" onClick=${close}><div class="help" role="dialog" aria-label="Keys"><h2>Keys</h2><dl>${KEYS.map(([key, text]) => html`
    <div key=${key}><dt><kbd>${key}</kbd></dt><dd>${text}</dd></div>`)}</dl><p class="dim">Every view is a link: copy the address.</p></div></div>`;
}
