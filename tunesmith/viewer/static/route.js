// The page, its arguments and its settings, all in the URL's hash: every view is a link.
import { useEffect, useState } from "./vendor/htm-preact.js";

export function parseRoute(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const [page, ...args] = path.split("/").map(decodeURIComponent);
  return { page: page || "curves", args, params: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function link(page, args = [], params = {}) {
  const path = [page, ...args].map(encodeURIComponent).join("/");
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

export function go(page, args, params) {
  location.hash = link(page, args, params);
}

// Change settings of the page without an entry in the browser's history.
export function setParams(changes) {
  const { page, args, params } = parseRoute(location.hash);
  history.replaceState(null, "", link(page, args, { ...params, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [route, setRoute] = useState(parseRoute(location.hash));
  useEffect(() => {
    const update = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", update);
    return () => removeEventListener("hashchange", update);
  }, []);
  return route;
}
