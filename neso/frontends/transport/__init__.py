"""Network transports: HTTP/1.1, HTTP/2 and gRPC servers on asyncio. They import no other package of Neso."""
