"""Keys and authenticated encryption.

`aead` holds every primitive, `keys` the hierarchy root → tenant → segment, `providers` the places
where root keys live.
"""
