// Runs one streamed request, and shows its progress.

import { postForEvents } from "./api.js";
import { useRef, useState } from "./lib.js";
import { RequestClock } from "./timeline.js";

const REFRESH_MS = 40;

/**
 * State of a request: {running, start, stop}.
 *
 * `start(path, body, onEvent, show)` calls `onEvent(event)` for each event, and `show({timing, error, stopped})` at most
 * every `REFRESH_MS` and at the end. `stop` disconnects, which cancels the request in the server.
 */
export function useGeneration() {
    const [running, setRunning] = useState(false);
    const controller = useRef(null);

    const start = async (path, body, onEvent, show) => {
        const own = (controller.current = new AbortController());
        const clock = new RequestClock();
        const end = { error: "", stopped: false };
        let timer = 0;
        const refresh = () => {
            timer = 0;
            show({ timing: clock.values(), ...end });
        };
        setRunning(true);
        refresh();
        try {
            for await (const event of postForEvents(path, body, own.signal)) {
                clock.chunk(event);
                onEvent(event);
                timer ||= setTimeout(refresh, REFRESH_MS);
            }
        } catch (error) {
            end.stopped = own.signal.aborted;
            end.error = own.signal.aborted ? "" : error.message;
        }
        clearTimeout(timer);
        clock.end();
        setRunning(false);
        refresh();
    };
    return { running, start, stop: () => controller.current?.abort() };
}

/** Fields that every streamed request of this page has. */
export const STREAM_FIELDS = {
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_timings: true,
};
