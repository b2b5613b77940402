"""What completions and chats have in common: generations gathered into one answer, or streamed."""
