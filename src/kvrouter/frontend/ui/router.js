// What the page asks of the router: relative addresses, so that it works behind a path of a proxy.

const TOKEN = "kvrouter-admin-token";
const ANSWERS_WITHIN_MS = 10_000;
const LONG_ID = /_id":\s*\d{16}/;

// The router did not answer, or not in time.
export class Unreachable extends Error {}

// The router answered, with an error: `status` and `code` say which.
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
    this.refusals = error?.refusals ?? {};
  }
}

export function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

export function useToken(given) {
  if (given) sessionStorage.setItem(TOKEN, given);
  else sessionStorage.removeItem(TOKEN);
}

// Ids of workers may be longer than JavaScript's numbers are exact: those become strings.
function exact(_key, value, context) {
  const isInexact = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
  return isInexact && context ? context.source : value;
}

function parsed(text) {
  return LONG_ID.test(text) ? JSON.parse(text, exact) : JSON.parse(text);
}

async function answered(path, options) {
  try {
    const response = await fetch(path, options);
    return { response, text: await response.text() };
  } catch (error) {
    throw new Unreachable(error.message);
  }
}

export async function ask(path, body) {
  const headers = {};
  if (token()) headers.authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const { response, text } = await answered(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    cache: "no-store",
    credentials: "same-origin",
    signal: AbortSignal.timeout(ANSWERS_WITHIN_MS),
  });
  if (response.ok) return parsed(text);
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    // a proxy's own page: the status has to do
  }
  throw new Refused(response.status, error);
}
