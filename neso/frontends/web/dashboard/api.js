// Requests to the server that served this page. Paths are relative, so the page works behind a proxy's prefix.

import { load, save } from "./lib.js";

const STORAGE_KEY = "neso.access";

/** An error response. `status` 0: the server cannot be reached. */
export class ApiError extends Error {
    constructor(status, message) {
        super(message);
        this.status = status;
    }
}

/** The API key and the header of restricted groups, kept until the tab is closed: {key, name, value}. */
export function access() {
    return load(sessionStorage, STORAGE_KEY, { key: "", name: "", value: "" });
}

/** Replace the API key and the header of restricted groups; null forgets them. */
export function setAccess(value) {
    save(sessionStorage, STORAGE_KEY, value);
}

function accessHeaders() {
    const { key, name, value } = access();
    return {
        ...(key ? { Authorization: `Bearer ${key}` } : {}),
        ...(name && value ? { [name]: value } : {}),
    };
}

/** URL of a path of this server. */
export function url(path) {
    return new URL(path, document.baseURI.split("#")[0]).href;
}

async function send(path, { body, signal } = {}) {
    const headers = accessHeaders();
    const options = { headers, signal, cache: "no-store" };
    if (body !== undefined) {
        options.method = "POST";
        options.body = JSON.stringify(body);
        headers["Content-Type"] = "application/json";
    }
    let response;
    try {
        response = await fetch(url(path), options);
    } catch (error) {
        throw error.name === "AbortError" ? error : new ApiError(0, "The server cannot be reached.");
    }
    if (!response.ok) {
        throw new ApiError(response.status, errorMessage(response.status, await response.text()));
    }
    return response;
}

/** Message of an error body in the format of OpenAI, Triton's OpenAI frontend or KServe. */
export function errorMessage(status, text) {
    try {
        const body = JSON.parse(text);
        const message = body.error?.message ?? body.detail ?? body.error;
        if (message) {
            return typeof message === "string" ? message : JSON.stringify(message);
        }
    } catch {
        // not JSON
    }
    return text.slice(0, 200) || `The server responded with status ${status}.`;
}

function connectionLost() {
    return new ApiError(0, "The connection to the server was lost before the end of the answer.");
}

/** GET JSON. */
export async function getJson(path) {
    return (await send(path)).json();
}

/** GET text. */
export async function getText(path) {
    return (await send(path)).text();
}

/** POST JSON, and return the JSON of the response. */
export async function postJson(path, body, signal) {
    return (await send(path, { body, signal })).json();
}

/**
 * POST JSON, and yield the data of the server-sent events of the response until `[DONE]`. An error event and the loss of
 * the connection throw `ApiError`.
 */
export async function* postForEvents(path, body, signal) {
    const response = await send(path, { body, signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    while (true) {
        let value;
        try {
            ({ value } = await reader.read());
        } catch (error) {
            throw error.name === "AbortError" ? error : connectionLost();
        }
        if (value === undefined) {
            throw connectionLost();
        }
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
            const data = block.split("\n").filter((line) => line.startsWith("data:"))
                .map((line) => line.slice(5).trimStart()).join("\n");
            if (data === "[DONE]") {
                return;
            }
            if (data) {
                const event = JSON.parse(data);
                if (event.error) {
                    throw new ApiError(event.error.code ?? 500, errorMessage(500, data));
                }
                yield event;
            }
        }
    }
}
