// The timeline of one request: phases measured by the server, and arrivals of the stream at this page.

import { formatNumber, formatPercent, formatSeconds, html } from "./lib.js";

const WIDTH = 600;
const SAME_READ_MS = 0.5; // chunks that arrive together have no gap

/** Times of a request at this page, in ms since it was sent. */
export class RequestClock {
    constructor() {
        this.started = performance.now();
        this.chunks = [];
        this.ended = null;
        this.server = null;
        this.usage = null;
    }

    /** Note an event of the stream. */
    chunk(event) {
        if (event.choices?.length) {
            this.chunks.push(performance.now() - this.started);
        }
        this.server = event.timings ?? this.server;
        this.usage = event.usage ?? this.usage;
    }

    end() {
        this.ended = performance.now() - this.started;
    }

    /** Plain values, which can be stored. */
    values() {
        const { chunks, ended, server, usage } = this;
        return { chunks, ended, server, usage };
    }
}

/** Tokens per second after the first one: as the server measured them or, until it has, as they arrived. */
function tokensPerSecond({ chunks, server, usage }) {
    if (server) {
        return server.predicted_n > 1 && server.predicted_ms > 0
            ? (server.predicted_n - 1) / server.predicted_ms * 1000 : null;
    }
    const elapsed = chunks.at(-1) - chunks[0];
    return usage && elapsed > 0 ? (usage.completion_tokens - 1) / elapsed * 1000 : null;
}

/** Figures of an answer that is being generated. */
export function progressSummary(timing) {
    const speed = tokensPerSecond(timing);
    return speed === null ? "" : `${timing.usage.completion_tokens} tokens · ${formatNumber(speed)} tokens/s`;
}

/** One line of figures: TTFT, speed, tokens. */
export function timingSummary(timing) {
    const { chunks, ended, usage } = timing;
    const speed = tokensPerSecond(timing);
    const parts = [];
    if (chunks.length) {
        parts.push(`first token ${formatSeconds(chunks[0] / 1000)}`);
    }
    if (speed !== null) {
        parts.push(`${formatNumber(speed)} tokens/s`);
    }
    if (usage) {
        parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
        const cached = usage.prompt_tokens_details?.cached_tokens;
        if (cached) {
            parts.push(`${cached} cached`);
        }
    }
    if (ended !== null) {
        parts.push(`${formatSeconds(ended / 1000)} in total`);
    }
    return parts.join(" · ");
}

/** `timing`: `RequestClock.values()`. */
export function Timeline({ timing }) {
    const { chunks, ended, server } = timing;
    const end = Math.max(ended ?? 0, chunks.at(-1) ?? 0, 1);
    const x = (time) => time / end * WIDTH;
    const phases = server ? phasesOf(server, chunks, end) : [];
    const gaps = chunks.slice(1).map((time, index) => time - chunks[index]).filter((gap) => gap >= SAME_READ_MS)
        .sort((a, b) => a - b);
    const middle = gaps[Math.floor(gaps.length / 2)];
    return html`
        <figure class="timeline">
            <svg viewBox="0 0 ${WIDTH} 62" role="img" aria-label="Timeline of the request"
                preserveAspectRatio="none">
                ${phases.map(({ name, from, to }) => html`
                    <rect class="phase ${name}" x=${x(from)} y="4" width=${Math.max(x(to) - x(from), 0.75)} height="20">
                        <title>${name} ${formatSeconds((to - from) / 1000)}</title>
                    </rect>`)}
                <line class="axis" x1="0" x2=${WIDTH} y1="45" y2="45" />
                ${chunks.map((time) => html`<line class="tick" x1=${x(time)} x2=${x(time)} y1="34" y2="56" />`)}
            </svg>
            <div class="scale"><span>0</span><span>${formatSeconds(end / 2000)}</span>
                <span>${formatSeconds(end / 1000)}</span></div>
            <figcaption>
                ${phases.map(({ name, title, from, to }) => html`
                    <span class="phase-key ${name}"><i aria-hidden="true"></i>${title}${" "}
                        <b>${formatSeconds((to - from) / 1000)}</b></span>`)}
                <span class="phase-key tick"><i aria-hidden="true"></i>${chunks.length} chunks
                    ${middle !== undefined && html`, median gap <b>${formatSeconds(middle / 1000)}</b>`}</span>
                ${server && server.draft_n > 0 && html`
                    <span>drafts accepted <b>${formatPercent(server.draft_n_accepted / server.draft_n)}</b></span>`}
            </figcaption>
        </figure>
    `;
}

/**
 * Phases on the page's clock. The server's clock has another zero: its decode begins with the first chunk, or earlier if
 * the chunks arrived late.
 */
function phasesOf(server, chunks, end) {
    const decode = Math.max(Math.min(chunks[0] ?? end, end - server.predicted_ms), 0);
    const prefill = Math.max(decode - server.prompt_ms, 0);
    const queue = Math.max(prefill - server.queue_ms, 0);
    return [
        { name: "network", title: "Network and parsing", from: 0, to: queue },
        { name: "queue", title: "Queue", from: queue, to: prefill },
        { name: "prefill", title: "Prefill", from: prefill, to: decode },
        { name: "decode", title: "Decode", from: decode, to: Math.min(decode + server.predicted_ms, end) },
    ];
}
