"""What `kvvault demo` needs: small models made on the spot, and the story told with them."""
