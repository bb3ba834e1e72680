package control

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"

	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/port/user"
)

// Views of a user network, as the last part of a path.
const (
	ViewFlows   = "flows"
	ViewLeases  = "leases"
	ViewDNS     = "dns"
	ViewPolicy  = "policy"
	ViewPublish = "publish"
)

// Views are the names of all views.
func Views() []string { return []string{ViewFlows, ViewLeases, ViewDNS, ViewPolicy, ViewPublish} }

// Places of user networks in the API's paths.
const (
	guestsPath   = "/v1/guests/"
	networksPath = "/v1/networks/"
)

// NetworkReply is an entry of the answer of GET /v1/networks.
type NetworkReply struct {
	Owner string `json:"owner"` // guest or switch
	Name  string `json:"name"`
	Path  string `json:"path"` // of the API; the names of views may follow
	Flows int    `json:"flows"`
}

// NetworksReply is the answer of GET /v1/networks: the networks that have views.
type NetworksReply struct {
	Networks []NetworkReply `json:"networks"`
}

func (a *api) networks(w http.ResponseWriter, _ *http.Request) {
	list := NetworksReply{Networks: []NetworkReply{}}
	for _, n := range a.backend.UserNetworks() {
		path := guestsPath + n.Name
		if n.Owner == daemon.OwnerSwitch {
			path = networksPath + n.Name
		}
		list.Networks = append(list.Networks, NetworkReply{Owner: n.Owner, Name: n.Name, Path: path, Flows: n.FlowCount()})
	}
	reply(w, http.StatusOK, list)
}

// userNetworks adds the views of guests' and of switches' networks.
func (a *api) userNetworks(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/networks", a.networks)
	for path, owner := range map[string]string{guestsPath: daemon.OwnerGuest, networksPath: daemon.OwnerSwitch} {
		handle := func(method, view string, serve func(http.ResponseWriter, *http.Request, *daemon.UserNetwork)) {
			mux.HandleFunc(method+" "+path+"{name}/"+view, func(w http.ResponseWriter, r *http.Request) {
				n, err := a.backend.UserNetwork(owner, r.PathValue("name"))
				if err != nil {
					fail(w, statusOf(err), err)
					return
				}
				serve(w, r, n)
			})
		}
		show := func(view string, of func(*daemon.UserNetwork) any) {
			handle("GET", view, func(w http.ResponseWriter, _ *http.Request, n *daemon.UserNetwork) { reply(w, http.StatusOK, of(n)) })
		}
		handle("GET", ViewFlows, flows)
		show(ViewLeases, func(n *daemon.UserNetwork) any { return n.Leases() })
		show(ViewDNS, func(n *daemon.UserNetwork) any { return n.DNS() })
		show(ViewPolicy, func(n *daemon.UserNetwork) any { return n.Policy() })
		show(ViewPublish, func(n *daemon.UserNetwork) any { return n.Publications() })
		handle("POST", ViewPublish, publish)
		handle("DELETE", ViewPublish, unpublish)
	}
}

func flows(w http.ResponseWriter, r *http.Request, n *daemon.UserNetwork) {
	query, err := flowQuery(r.URL.Query())
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	reply(w, http.StatusOK, n.Flows(query))
}

func flowQuery(values url.Values) (q user.FlowQuery, err error) {
	for key, list := range values {
		value := list[0]
		switch key {
		case "proto":
			q.Proto = value
		case "sort":
			q.Sort = value
		case "guest":
			if q.Guest, err = netip.ParseAddr(value); err != nil {
				return q, fmt.Errorf("guest=%s: accepted are addresses", value)
			}
		case "limit":
			if q.Limit, err = strconv.Atoi(value); err != nil || q.Limit < 1 {
				return q, fmt.Errorf("limit=%s: accepted are 1 to %d", value, user.MaxListed)
			}
		default:
			return q, fmt.Errorf("%s: accepted are proto, guest, sort and limit", key)
		}
		if len(list) > 1 {
			return q, fmt.Errorf("%s is given twice", key)
		}
	}
	return q, q.Validate()
}

// Publish is the body of POST and DELETE …/publish.
type Publish struct {
	Publish string `json:"publish"` // as the network's key of this name
}

func publish(w http.ResponseWriter, r *http.Request, n *daemon.UserNetwork) {
	change(w, r, http.StatusCreated, n.Publish)
}

func unpublish(w http.ResponseWriter, r *http.Request, n *daemon.UserNetwork) {
	change(w, r, http.StatusOK, n.Unpublish)
}

// change applies what the body says and answers with the body as it was understood.
func change(w http.ResponseWriter, r *http.Request, done int, apply func(user.Publication) error) {
	var body Publish
	if !decode(w, r, "a publication", &body) {
		return
	}
	what, err := user.ParsePublication(body.Publish)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if err := apply(what); err != nil {
		fail(w, statusOfPublish(err), err)
		return
	}
	reply(w, done, Publish{what.String()})
}

func statusOfPublish(err error) int {
	switch {
	case errors.Is(err, user.ErrPublished), errors.Is(err, user.ErrTaken):
		return http.StatusConflict
	case errors.Is(err, user.ErrNotPublished):
		return http.StatusNotFound
	case errors.Is(err, user.ErrPublication):
		return http.StatusBadRequest
	}
	return statusOf(err)
}
