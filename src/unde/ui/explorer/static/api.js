// Talking to the server. The token is in the address of the page and goes along in a header.

const token = new URLSearchParams(location.search).get("token") ?? "";

export class Problem extends Error {
  constructor(message, status, more = {}) {
    super(message);
    this.status = status;
    this.more = more;
  }
}

async function call(method, path, body, signal) {
  let answer;
  try {
    answer = await fetch(path, { method, body, signal, headers: { "x-unde-token": token } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("the server does not answer: is `unde serve` still running?", 0);
  }
  if (answer.ok) return answer;
  let said = {};
  try {
    said = await answer.json();
  } catch {
    // no JSON: the status has to do
  }
  throw new Problem(said.error ?? `the server answered ${answer.status}`, answer.status, said);
}

export const get = async (path, signal) => (await call("GET", path, undefined, signal)).json();
export const post = async (path, said, signal) => (await call("POST", path, JSON.stringify(said), signal)).json();
export const send = async (path, file) => (await call("POST", path, file)).json();
export const text = async (path) => (await call("GET", path)).text();

/** Something that waits in the line of the model. `tell` hears how far it is; aborting takes it out of the line. */
export async function job(path, said, tell = () => {}, signal = undefined) {
  const { job: id } = await post(path, said);
  const cancel = () => post(`/api/jobs/${id}/cancel`, {}).catch(() => {});
  signal?.addEventListener("abort", cancel, { once: true });
  for (;;) {
    if (signal?.aborted) {
      cancel();
      throw new DOMException("cancelled", "AbortError");
    }
    const now = await get(`/api/jobs/${id}`);
    tell(now);
    if (now.state === "done") return now.result;
    if (now.state === "failed") throw new Problem(now.error, 400);
    if (now.state === "cancelled") throw new DOMException("cancelled", "AbortError");
  }
}
