// Samples of the server's metrics, and rates, gauges and quantiles between them.

const NAMES = {
    "vllm:generation_tokens_total": "outputTokens",
    "vllm:prompt_tokens_total": "promptTokens",
    "vllm:request_success_total": "finished",
    "nv_inference_request_success": "succeeded",
    "nv_inference_request_failure": "failed",
    "nv_inference_pending_request_count": "pending",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kvUsage",
    "vllm:prefix_cache_queries_total": "prefixQueries",
    "vllm:prefix_cache_hits_total": "prefixHits",
    "vllm:spec_decode_num_draft_tokens_total": "draftTokens",
    "vllm:spec_decode_num_accepted_tokens_total": "acceptedTokens",
    "vllm:time_to_first_token_seconds_bucket": "firstToken",
    "vllm:inter_token_latency_seconds_bucket": "interToken",
    "vllm:request_queue_time_seconds_sum": "queueSeconds",
    "vllm:request_queue_time_seconds_count": "queueCount",
};
const LABEL = /([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/g;
const MAX_SAMPLES = 1800;

/**
 * Parse metrics in Prometheus' text format.
 *
 * Returns {model: {name: number, or for a histogram [[upper bound, cumulative count], ...]}} of the metrics in `NAMES`.
 * `finished` is counted by reason, as `finished.stop`.
 */
export function parseMetrics(text) {
    const models = {};
    for (const line of text.split("\n")) {
        const brace = line.indexOf("{");
        const name = brace < 0 ? undefined : NAMES[line.slice(0, brace)];
        if (name === undefined) {
            continue;
        }
        const end = line.lastIndexOf("}");
        const labels = {};
        for (const [, label, value] of line.slice(brace, end).matchAll(LABEL)) {
            labels[label] = value.replace(/\\(.)/g, "$1");
        }
        const value = Number(line.slice(end + 1).trim().split(" ")[0]);
        const values = (models[labels.model] ??= {});
        if (labels.le !== undefined) {
            addToBucket((values[name] ??= []), labels.le === "+Inf" ? Infinity : Number(labels.le), value);
        } else {
            const key = name === "finished" ? `finished.${labels.finished_reason}` : name;
            values[key] = key === "kvUsage" ? Math.max(values[key] ?? 0, value) : (values[key] ?? 0) + value;
        }
    }
    return models;
}

/** Add a count to a histogram: several versions of a model have the same buckets. */
function addToBucket(buckets, bound, count) {
    const known = buckets.find((bucket) => bucket[0] === bound);
    if (known) {
        known[1] += count;
    } else {
        buckets.push([bound, count]);
    }
}

/** Samples of one server since the page was opened. Times are in seconds since 1970. */
export class MetricHistory {
    constructor() {
        this.samples = [];
    }

    /** Add a scrape. Counters that went down mean that the server was restarted: earlier samples are dropped. */
    add(time, models) {
        const last = this.samples.at(-1);
        if (last && total(models, null, "succeeded") + total(models, null, "outputTokens")
            < total(last.models, null, "succeeded") + total(last.models, null, "outputTokens")) {
            this.samples = [];
        }
        this.samples.push({ time, models });
        if (this.samples.length > MAX_SAMPLES) {
            this.samples.shift();
        }
    }

    /** Names of the models in the last sample. */
    models() {
        return Object.keys(this.samples.at(-1)?.models ?? {}).sort();
    }

    /** Times of the last `seconds`. */
    times(seconds) {
        return this.since(seconds).map((sample) => sample.time);
    }

    /** A gauge, or a counter's total, at each time. */
    gauge(seconds, model, name, combine = "sum") {
        return this.since(seconds).map((sample) => total(sample.models, model, name, combine));
    }

    /** Increase per second of a counter over the preceding `window` seconds, at each time. */
    rate(seconds, model, name, window = 10) {
        return this.overWindow(seconds, window, (before, after) => {
            const increase = total(after.models, model, name) - total(before.models, model, name);
            return increase / (after.time - before.time);
        });
    }

    /** Increase of one counter divided by that of another over the preceding `window` seconds; null without any. */
    ratio(seconds, model, name, of, window = 30) {
        return this.overWindow(seconds, window, (before, after) => {
            const all = total(after.models, model, of) - total(before.models, model, of);
            const part = total(after.models, model, name) - total(before.models, model, name);
            return all > 0 ? part / all : null;
        });
    }

    /** A quantile of the values that a histogram got in the preceding `window` seconds; null without any. */
    quantile(seconds, model, name, fraction, window = 30) {
        return this.overWindow(seconds, window, (before, after) =>
            quantileOf(increase(buckets(before.models, model, name), buckets(after.models, model, name)), fraction));
    }

    since(seconds) {
        const end = this.samples.at(-1)?.time ?? 0;
        return this.samples.filter((sample) => sample.time >= end - seconds);
    }

    overWindow(seconds, window, measure) {
        const shown = this.since(seconds);
        const first = this.samples.length - shown.length;
        let start = 0;
        return shown.map((sample, index) => {
            const current = first + index;
            while (start < current - 1 && this.samples[start].time < sample.time - window - 0.5) {
                start += 1;
            }
            return start < current ? measure(this.samples[start], sample) : null;
        });
    }
}

function select(models, model) {
    return model === null ? Object.values(models) : [models[model] ?? {}];
}

function total(models, model, name, combine = "sum") {
    const values = select(models, model).map((each) => each[name] ?? 0);
    return combine === "max" ? Math.max(0, ...values) : values.reduce((sum, value) => sum + value, 0);
}

/** Sum of the histograms of the selected models, by upper bound. */
function buckets(models, model, name) {
    const sums = new Map();
    for (const values of select(models, model)) {
        for (const [bound, count] of values[name] ?? []) {
            sums.set(bound, (sums.get(bound) ?? 0) + count);
        }
    }
    return sums;
}

function increase(before, after) {
    return [...after].sort((a, b) => a[0] - b[0]).map(([bound, count]) => [bound, count - (before.get(bound) ?? 0)]);
}

/** Quantile of cumulative buckets, interpolated within its bucket as in Prometheus. */
export function quantileOf(cumulative, fraction) {
    const count = cumulative.at(-1)?.[1] ?? 0;
    if (count <= 0) {
        return null;
    }
    const rank = fraction * count;
    let lower = 0;
    let below = 0;
    for (const [bound, upTo] of cumulative) {
        if (upTo >= rank) {
            if (bound === Infinity) {
                return lower;
            }
            return lower + (bound - lower) * (upTo > below ? (rank - below) / (upTo - below) : 1);
        }
        [lower, below] = [bound, upTo];
    }
    return lower;
}
