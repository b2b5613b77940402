"""Chats: from messages to a prompt, and from the text that is generated to a message."""
