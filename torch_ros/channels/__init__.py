"""How two processes meet over TCP, and what they speak through then. Knows no registrations."""
