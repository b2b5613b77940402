"""Network transports: HTTP/1.1, HTTP/2 and gRPC servers on asyncio. They import nothing else of Neso."""
