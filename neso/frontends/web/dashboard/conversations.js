// Conversations that this browser keeps, in localStorage: an index, and one item for each conversation.

import { load, save } from "./lib.js";

const INDEX = "neso.conversations";
const MAX_KEPT = 50;
const MAX_CHARS = 2 << 20; // browsers keep about 5 million characters of a page
const MAX_TITLE = 200;

const keyOf = (id) => `neso.conversation.${id}`;

/** Name of a new conversation. `crypto.randomUUID` needs HTTPS. */
export function newId() {
    return Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
}

/** The kept conversations, last changed first: [{id, title, changed}]. `changed`: ms since 1970. */
export function listConversations() {
    return load(localStorage, INDEX, []);
}

/** Messages of a conversation; none if it is not kept. */
export function loadConversation(id) {
    return load(localStorage, keyOf(id), []);
}

/** Keep a conversation, if necessary instead of the oldest ones. Returns false if it is too large for the browser. */
export function keepConversation(id, messages) {
    if (JSON.stringify(messages).length > MAX_CHARS) {
        return false;
    }
    const others = listConversations().filter((each) => each.id !== id);
    const entries = [{ id, title: titleOf(messages), changed: Date.now() }, ...others];
    const dropOldest = () => save(localStorage, keyOf(entries.pop().id), null);
    while (entries.length > MAX_KEPT) {
        dropOldest();
    }
    while (!save(localStorage, keyOf(id), messages)) {
        if (entries.length === 1) {
            return false;
        }
        dropOldest();
    }
    return save(localStorage, INDEX, entries);
}

/** Delete a conversation, or all of them if `id` is null. */
export function deleteConversation(id) {
    const [kept, deleted] = [[], []];
    for (const each of listConversations()) {
        (id === null || each.id === id ? deleted : kept).push(each);
    }
    deleted.forEach((each) => save(localStorage, keyOf(each.id), null));
    save(localStorage, INDEX, kept.length ? kept : null);
}

function titleOf(messages) {
    const text = messages.find((message) => message.role === "user")?.text.trim().replace(/\s+/g, " ");
    return text ? text.slice(0, MAX_TITLE) : "Image";
}
