// Answers of the server by path, or those that a report contains.
import { useEffect, useRef, useState } from "./vendor/htm-preact.js";

const embedded = document.getElementById("report");
export const report = embedded ? JSON.parse(embedded.textContent) : null;

export function buildUrl(path, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params || {})) {
    if (value !== "" && value !== null && value !== undefined) query.append(name, String(value));
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

export async function fetchAnswer(path, params, signal) {
  const url = buildUrl(path, params);
  if (report) {
    if (url in report.answers) return report.answers[url];
    throw new Error("This is left out of the report; open the run with: tunesmith view");
  }
  const response = await fetch(`api/${url}`, { signal });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

export async function sendNotes(run, notes) {
  const response = await fetch(`api/notes/${run}`, { method: "PUT", body: JSON.stringify(notes) });
  if (!response.ok) throw new Error(await response.text());
}

// The answer for a path, fetched again when `version` changes; the old one stays until the new one is there.
// A path of null asks nothing.
export function useAnswer(path, params, version = 0) {
  const [state, setState] = useState({ data: null, error: null, url: null });
  const url = path === null ? null : buildUrl(path, params);
  const current = useRef(null);
  useEffect(() => {
    if (url === null) return undefined;
    const abort = new AbortController();
    current.current = url;
    fetchAnswer(path, params, abort.signal).then(
      (data) => current.current === url && setState({ data, error: null, url }),
      (error) => error.name !== "AbortError" && current.current === url && setState({ data: null, error: error.message, url }),
    );
    return () => abort.abort();
  }, [url, version]);
  return state.url === url ? state : { data: null, error: null, url };
}
